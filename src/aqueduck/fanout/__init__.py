"""The flow `fanout`: one DuckLake into many."""
