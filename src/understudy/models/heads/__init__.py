"""The networks of trained drafts: one definition of each, for training and for serving."""
