"""The flow `events`: PostgreSQL's changes as JSON events."""
