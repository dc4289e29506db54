"""Aqueduck's streaming queries and jobs: adapters between Spark and the code that its tasks run."""
