"""Aqueduck's own records in the lake: positions, table states, parked changes, partition marks."""
