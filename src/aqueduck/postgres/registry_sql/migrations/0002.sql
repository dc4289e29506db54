-- Which columns and rows of a table go into the lake, and how: docs/columns.md.

alter table aqueduck.table_mappings add column options jsonb not null default '{}';

-- They have one more argument now.
drop function if exists aqueduck.add_table(text, text, text, text, boolean);
drop function if exists aqueduck._check_same(aqueduck.table_mappings, aqueduck.sync_groups, boolean, text[], text);
