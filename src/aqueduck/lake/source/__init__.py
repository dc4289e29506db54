"""A lake as a source: its lake snapshots, rows and changes, for the fan-out and for Spark formats."""
