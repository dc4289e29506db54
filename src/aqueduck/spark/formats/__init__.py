"""The formats for anyone's Spark: `postgres_cdc`, `postgres_table`, `ducklake`, `ducklake_changes`."""
