"""Spark: the session, our queries and jobs, and the formats for anyone's own Spark."""
