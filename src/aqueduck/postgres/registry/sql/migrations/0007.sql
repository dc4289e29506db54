-- What people write into the registry by hand has at least the form that its readers expect.  A row without it ended the
-- whole service, so none that is repaired here was ever in force.

create or replace function aqueduck._setting_fits(name text, value jsonb) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    return aqueduck._check_setting(name, value #>> '{}', 'global') = value;
exception when others then
    return false;
end
$$;
delete from aqueduck.settings where not aqueduck._setting_fits(name, value);
alter table aqueduck.settings add constraint settings_fit check (aqueduck._setting_fits(name, value));

update aqueduck.sync_groups set settings = '{}' where jsonb_typeof(settings) <> 'object';
update aqueduck.sync_groups set file_settings = '{}' where jsonb_typeof(file_settings) <> 'object';
alter table aqueduck.sync_groups
    add constraint sync_groups_objects check (jsonb_typeof(settings) = 'object' and jsonb_typeof(file_settings) = 'object');

update aqueduck.table_mappings set settings = '{}' where jsonb_typeof(settings) <> 'object';
update aqueduck.table_mappings set file_settings = '{}' where jsonb_typeof(file_settings) <> 'object';
update aqueduck.table_mappings set options = '{}', enabled = false where jsonb_typeof(options) <> 'object';
alter table aqueduck.table_mappings add constraint table_mappings_objects check (
    jsonb_typeof(settings) = 'object' and jsonb_typeof(file_settings) = 'object' and jsonb_typeof(options) = 'object');
