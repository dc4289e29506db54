-- Which columns and rows of a table go into the lake, and how: docs/columns.md.

alter table aqueduck.table_mappings add column options jsonb not null default '{}';
