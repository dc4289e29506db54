-- The configuration file is declarative: entries in it are created or updated, and entries that an earlier
-- version had and that are no longer in it are removed. Entries made by SQL are left alone.

create or replace function aqueduck._reconcile(file jsonb) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    lake constant text := file ->> 'lake';
    groups constant jsonb := file -> 'groups';
    changes bigint := 0;
    kept bigint[] := '{}';
    fresh jsonb[] := '{}';
    item record;
    old aqueduck.table_mappings;
begin
    perform aqueduck._begin_change();
    for item in select value from jsonb_array_elements(groups) loop
        changes := changes + aqueduck._put_group(item.value, lake);
    end loop;
    for item in
        select g.value ->> 'name' as group_name, t.value
        from jsonb_array_elements(groups) g, jsonb_array_elements(g.value -> 'tables') t
    loop
        old := aqueduck._mapping_of_file(item.group_name, item.value);
        if old.id is null then
            fresh := fresh || jsonb_build_object('group', item.group_name, 'table', item.value);
        else
            kept := kept || old.id;
            changes := changes + aqueduck._update_from_file(old, item.group_name, item.value);
        end if;
    end loop;
    changes := changes + aqueduck._remove_what_left_the_file(lake, groups, kept);
    for item in select f ->> 'group' as group_name, f -> 'table' as value from unnest(fresh) f loop
        perform aqueduck._insert_from_file(item.group_name, item.value);
        changes := changes + 1;
    end loop;
    if changes > 0 then
        perform aqueduck._notify('file');
    end if;
    return changes;
end
$$;

create or replace function aqueduck._put_group(wanted jsonb, lake text) returns int
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    group_name constant text := wanted ->> 'name';
    new_settings constant jsonb := aqueduck._check_settings(wanted -> 'settings', 'group');
    old aqueduck.sync_groups;
begin
    select * into old from aqueduck.sync_groups g where g.name = group_name;
    if old.lake <> lake then
        perform aqueduck._refuse(format('the group %s fills another lake, %s', group_name, old.lake), format(
            'choose another name for the group; if it is the same lake at a new location: select aqueduck.release_group(%L)',
            group_name));
    end if;
    perform aqueduck._check_group(group_name, wanted ->> 'publication', wanted ->> 'slot_name', wanted ->> 'capture');
    if old.id is null then
        insert into aqueduck.sync_groups
            (name, publication, slot_name, capture, lake, settings, file_settings, created_by_file)
        values (group_name, wanted ->> 'publication', wanted ->> 'slot_name', wanted ->> 'capture', _put_group.lake,
            new_settings, new_settings, true);
        return 1;
    end if;
    update aqueduck.sync_groups g
    set publication = wanted ->> 'publication', slot_name = wanted ->> 'slot_name', capture = wanted ->> 'capture',
        lake = _put_group.lake, removed_at = null, created_by_file = g.created_by_file or g.removed_at is not null,
        settings = g.settings - array(select jsonb_object_keys(g.file_settings)) || new_settings,
        file_settings = new_settings
    where g.id = old.id and (g.publication, g.slot_name, g.capture, g.lake, g.removed_at, g.file_settings)
            is distinct from (wanted ->> 'publication', wanted ->> 'slot_name', wanted ->> 'capture', _put_group.lake,
                null::timestamptz, new_settings)
        -- The file's settings replace settings made by SQL in the meantime.
        or g.id = old.id and not g.settings @> new_settings;
    return found::int;
end
$$;

-- The mapping that already matches the file, but perhaps in another group. One with another target or mode is
-- removed: it needs a new copy.
create or replace function aqueduck._mapping_of_file(group_name text, wanted jsonb) returns aqueduck.table_mappings
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    parts constant text[] := array[wanted ->> 'source_schema', wanted ->> 'source_table'];
    old aqueduck.table_mappings := aqueduck._mapping_beside(aqueduck._group(group_name), aqueduck._find_oid(parts), parts);
begin
    if (old.target_schema, old.target_table, old.mode, old.source_column, old.source_value)
            is distinct from (wanted ->> 'target_schema', wanted ->> 'target_table', wanted ->> 'mode',
                wanted ->> 'source_column', wanted ->> 'source_value') then
        update aqueduck.table_mappings m set removed_at = now() where m.id = old.id;
        return null;
    end if;
    return old;
end
$$;

create or replace function aqueduck._update_from_file(old aqueduck.table_mappings, group_name text, wanted jsonb)
returns int language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    parts constant text[] := array[wanted ->> 'source_schema', wanted ->> 'source_table'];
    source_oid constant bigint := aqueduck._find_oid(parts);
    new_settings constant jsonb := aqueduck._check_settings(wanted -> 'settings', 'table');
    in_group constant aqueduck.sync_groups := aqueduck._group(group_name);
    followed boolean := false;
begin
    if source_oid is not null then
        followed := aqueduck._follow_source(old, source_oid, parts, false);
    end if;
    update aqueduck.table_mappings m
    set group_id = in_group.id, copy = (wanted ->> 'copy')::boolean, options = wanted -> 'options',
        adopt = m.adopt or coalesce((wanted ->> 'adopt')::boolean, false),
        settings = m.settings - array(select jsonb_object_keys(m.file_settings)) || new_settings,
        file_settings = new_settings
    where m.id = old.id and ((m.group_id, m.copy, m.options, m.file_settings)
            is distinct from (in_group.id, (wanted ->> 'copy')::boolean, wanted -> 'options', new_settings)
        or not m.settings @> new_settings or not m.adopt and coalesce((wanted ->> 'adopt')::boolean, false));
    return (found or followed)::int;
end
$$;

-- A table that does not exist, or has no key, is accepted: the service shows it as errored.
create or replace function aqueduck._insert_from_file(group_name text, wanted jsonb) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    in_group constant aqueduck.sync_groups := aqueduck._group(group_name);
    new_settings constant jsonb := aqueduck._check_settings(wanted -> 'settings', 'table');
begin
    perform aqueduck._check_mode(wanted ->> 'mode');
    perform aqueduck._check_target(in_group, array[wanted ->> 'target_schema', wanted ->> 'target_table'],
        wanted ->> 'mode', wanted ->> 'source_column', wanted ->> 'source_value');
    insert into aqueduck.table_mappings (group_id, source_oid, source_schema, source_table, target_schema, target_table,
        mode, copy, source_column, source_value, options, settings, file_settings, created_by_file, adopt)
    values (in_group.id, aqueduck._find_oid(array[wanted ->> 'source_schema', wanted ->> 'source_table']),
        wanted ->> 'source_schema', wanted ->> 'source_table', wanted ->> 'target_schema', wanted ->> 'target_table',
        wanted ->> 'mode', (wanted ->> 'copy')::boolean, wanted ->> 'source_column', wanted ->> 'source_value',
        wanted -> 'options', new_settings, new_settings, true, coalesce((wanted ->> 'adopt')::boolean, false));
end
$$;

create or replace function aqueduck._remove_what_left_the_file(lake text, groups jsonb, kept bigint[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    names constant text[] := array(select value ->> 'name' from jsonb_array_elements(groups));
    removed bigint;
    more bigint;
begin
    update aqueduck.table_mappings m set removed_at = now()
    from aqueduck.sync_groups g
    where g.id = m.group_id and g.lake = _remove_what_left_the_file.lake and m.created_by_file and m.removed_at is null
        and m.id <> all (kept);
    get diagnostics removed = row_count;
    -- A group that still has tables made by SQL now belongs to SQL.
    update aqueduck.sync_groups g
    set removed_at = case when not used.by_sql then now() end, created_by_file = not used.by_sql
    from (select o.id, exists (select from aqueduck.table_mappings m where m.group_id = o.id and m.removed_at is null)
              as by_sql from aqueduck.sync_groups o) used
    where used.id = g.id and g.lake = _remove_what_left_the_file.lake and g.created_by_file and g.removed_at is null
        and g.name <> all (names);
    get diagnostics more = row_count;
    return removed + more;
end
$$;
