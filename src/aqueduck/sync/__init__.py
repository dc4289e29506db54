"""The flow `sync`: PostgreSQL into DuckLake."""
