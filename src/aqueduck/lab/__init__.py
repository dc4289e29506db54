"""The demo, the benchmarks and their embedded PostgreSQL server; only the command line imports it."""
