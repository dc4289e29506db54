"""Spark: the session, Aqueduck's queries and jobs, and the formats for users' own Spark code."""
