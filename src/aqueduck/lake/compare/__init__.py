"""Digests of rows, by which the two sides of a comparison are read."""
