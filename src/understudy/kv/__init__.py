"""Where keys and values lie: blocks with reference counts, sequences as lengths, and committed prefixes to share."""
