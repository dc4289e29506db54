"""A group while it runs: its query, its copies, its batches, and tables that come and go."""
