"""Spark: session, data sources, queries."""
