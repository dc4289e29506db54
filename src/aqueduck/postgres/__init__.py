"""PostgreSQL: connections, slots, capture."""
