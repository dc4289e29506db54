"""Our streaming queries and jobs: adapters between Spark and the work of its tasks."""
