"""Values in a lake: which types it keeps exactly, and how they are converted to and from Spark."""
