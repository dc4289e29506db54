-- Values that no service writes, and on which queries over all groups would fail.

update aqueduck.table_mappings set source_oid = null where source_oid not between 0 and 4294967295;
update aqueduck.table_mappings set lag_seconds = 0 where not (lag_seconds > '-infinity' and lag_seconds < 'infinity');
alter table aqueduck.table_mappings add constraint table_mappings_numbers check (
    source_oid between 0 and 4294967295 and lag_seconds > '-infinity' and lag_seconds < 'infinity');
