"""Digests of rows: how two sides of a comparison are read."""
