"""Columns of a table: its versions over time, their types in the lake, and the effect of a projection."""
