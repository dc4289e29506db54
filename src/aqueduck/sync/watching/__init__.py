"""Watching the source and the lake for changes that the stream does not contain."""
