"""Row-invariant arithmetic: a row's bits do not depend on the rows beside it. `reference` is the slow obvious twin."""
