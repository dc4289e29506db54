"""Rows of anyone's Spark query into a lake table."""
