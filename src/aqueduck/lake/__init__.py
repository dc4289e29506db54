"""DuckLake: sessions, folds, targets, the ledger, commits, upkeep, sources, destinations and comparisons."""
