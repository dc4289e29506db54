"""DuckLake: catalog, fold, apply, commit."""
