"""DuckLake: sessions, folds, targets, the ledger, commits, upkeep, sources, destinations, writes and comparisons."""
