"""Sessions with a lake: the engine, its extensions, errors, quoting, files and storage."""
