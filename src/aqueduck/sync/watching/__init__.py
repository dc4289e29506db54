"""Watching the source and the lake for what the stream does not bring."""
