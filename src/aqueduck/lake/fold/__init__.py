"""Fold staged changes into rows: the net effect of a run of changes, for every mode."""
