"""How values look in a lake: which types it keeps exactly, and how they reach Spark."""
