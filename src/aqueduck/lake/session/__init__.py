"""Lake sessions: the DuckDB engine and its extensions, errors, quoting, files and storage."""
