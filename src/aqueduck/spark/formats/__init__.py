"""The formats for users' own Spark code: `postgres_cdc`, `postgres_table`, `ducklake`, `ducklake_changes`."""
