"""Columns of a table: which ones it has over time, which type each has in the lake, and what a projection makes of them."""
