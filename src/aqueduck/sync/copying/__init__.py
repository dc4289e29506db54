"""Initial copies of tables beside the stream, and how they take effect."""
