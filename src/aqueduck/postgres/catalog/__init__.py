"""What PostgreSQL's catalog says about tables: columns, keys, partitions, row security."""
