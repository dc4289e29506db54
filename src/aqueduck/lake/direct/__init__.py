"""Write small batches of many tables into DuckLake's catalog directly, as the DuckLake 1.0 specification says (ADR 73)."""
