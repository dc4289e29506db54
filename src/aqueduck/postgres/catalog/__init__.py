"""PostgreSQL's catalog information on tables: columns, keys, partitions, row security."""
