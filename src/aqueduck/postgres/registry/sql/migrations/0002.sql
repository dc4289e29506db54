-- Modes besides upsert and append, and targets that several sources fill.

alter table aqueduck.table_mappings drop constraint table_mappings_mode_check;
alter table aqueduck.table_mappings add constraint table_mappings_mode_check
    check (mode in ('upsert', 'append', 'history', 'soft_delete'));
-- The column of the target that tells the rows of its sources apart, and what this source has there.
alter table aqueduck.table_mappings add column source_column text, add column source_value text,
    add constraint table_mappings_source_check check ((source_column is null) = (source_value is null));
