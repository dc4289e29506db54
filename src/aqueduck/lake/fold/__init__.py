"""From staged changes to rows: the net effect of a run of changes, for every mode."""
