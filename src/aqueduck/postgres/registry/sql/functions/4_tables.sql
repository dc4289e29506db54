-- Tables: their desired state. The service publishes, copies and removes them.

-- A table with a similar name that is synced.
create or replace function aqueduck._nearest_synced(name text, group_name text) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    select aqueduck._nearest(_nearest_synced.name, array_agg(m.source_table),
                             array_agg(format('%I.%I', m.source_schema, m.source_table)))
    from aqueduck.table_mappings m join aqueduck.sync_groups g on g.id = m.group_id
    where m.removed_at is null and (_nearest_synced.group_name is null or g.name = _nearest_synced.group_name)
$$;

-- The one mapping of a source table. A renamed table is found by its new name, a dropped one by its last
-- name.
create or replace function aqueduck._mapping(source text, group_name text default null)
returns aqueduck.table_mappings language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    parts constant text[] := aqueduck._parse_name(source, 'public', true);
    found_oid constant bigint := aqueduck._find_oid(parts);
    mapping aqueduck.table_mappings;
    ids bigint[];
    names text;
begin
    select array_agg(m.id), string_agg(g.name, ', ' order by g.name) into ids, names
    from aqueduck.table_mappings m join aqueduck.sync_groups g on g.id = m.group_id
    where m.removed_at is null and (_mapping.group_name is null or g.name = _mapping.group_name)
        and (m.source_oid = found_oid or (m.source_schema = parts[1] and m.source_table = parts[2]
            and (m.source_oid is null or not aqueduck._exists(m.source_oid))));
    if ids is null then
        perform aqueduck._refuse(format('%I.%I is not synced%s', parts[1], parts[2], ' in the group ' || group_name),
            coalesce('did you mean ' || aqueduck._nearest_synced(parts[2], group_name) || '?',
                    'select source from aqueduck.tables() lists what is')
                || format('; to add it: select aqueduck.add_table(%L)', format('%I.%I', parts[1], parts[2])));
    elsif cardinality(ids) > 1 then
        perform aqueduck._refuse(format('%I.%I is in the groups %s', parts[1], parts[2], names),
            'name the group with group_name');
    end if;
    select * into mapping from aqueduck.table_mappings m where m.id = ids[1];
    return mapping;
end
$$;

-- A mapping of the same table into the same lake; a group that no service has claimed may belong to any lake.
create or replace function aqueduck._mapping_beside(in_group aqueduck.sync_groups, source_oid bigint, parts text[])
returns aqueduck.table_mappings language sql stable set search_path = pg_catalog, pg_temp as $$
    select m.* from aqueduck.table_mappings m join aqueduck.sync_groups g on g.id = m.group_id
    where m.removed_at is null and coalesce(g.lake = in_group.lake, true)
        and (m.source_oid = _mapping_beside.source_oid or (m.source_schema = parts[1] and m.source_table = parts[2]
            and (m.source_oid is null or not aqueduck._exists(m.source_oid))))
    order by g.id = in_group.id desc limit 1
$$;

-- Several sources may fill a target if they have the same mode, and a column identifies the source of each
-- row.
drop function if exists aqueduck._check_target(aqueduck.sync_groups, text[], bigint);
create or replace function aqueduck._check_target(in_group aqueduck.sync_groups, target text[], mode text,
                                                  source_column text, source_value text)
returns void language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    other record;
begin
    if lower(target[1]) = 'aqueduck' then
        perform aqueduck._refuse(format('the schema of the target %I.%I is Aqueduck''s own', target[1], target[2]),
            'choose a target in another schema');
    end if;
    -- DuckDB ignores the case of names.
    select m.source_schema, m.source_table, g.name, m.source_value as value into other
    from aqueduck.table_mappings m join aqueduck.sync_groups g on g.id = m.group_id
    where m.removed_at is null and coalesce(g.lake = in_group.lake, true)
        and lower(m.target_schema) = lower(target[1]) and lower(m.target_table) = lower(target[2])
        and not coalesce((m.mode, m.source_column) = (_check_target.mode, _check_target.source_column)
            and m.source_value <> _check_target.source_value, false);
    if found then
        perform aqueduck._refuse(format('the target %I.%I is already filled from %I.%I in the group %s',
            target[1], target[2], other.source_schema, other.source_table, other.name),
            'choose another target; or give both sources the same mode and source_column, and a source_value each');
    end if;
end
$$;

create or replace function aqueduck._check_mode(mode text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if mode is null or mode not in ('upsert', 'append', 'history', 'soft_delete') then
        perform aqueduck._refuse(format('the mode %L is not valid', mode), 'use upsert, append, history or soft_delete');
    end if;
end
$$;

-- The form of columns, masks, row filter and layout.
create or replace function aqueduck._check_options(options jsonb) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    item record;
begin
    if jsonb_typeof(options) is distinct from 'object' then
        perform aqueduck._refuse('options must be an object', 'such as {"exclude": ["notes"]}');
    end if;
    for item in select * from jsonb_each(options) loop
        if item.key not in ('columns', 'exclude', 'rename', 'mask', 'where', 'partition_by', 'sort_by', 'target_file_size') then
            perform aqueduck._refuse(format('unknown option %s', item.key),
                'known options: columns, exclude, rename, mask, where, partition_by, sort_by, target_file_size');
        elsif item.key = 'target_file_size' and jsonb_typeof(item.value) in ('number', 'string') then
            null;
        elsif jsonb_typeof(item.value) <> (case when item.key in ('columns', 'exclude', 'partition_by', 'sort_by') then 'array'
                when item.key = 'where' then 'string' else 'object' end) then
            perform aqueduck._refuse(format('the option %s has the wrong form', item.key),
                'see docs/columns.md and docs/layout.md');
        end if;
    end loop;
    if options ? 'columns' and options ? 'exclude' then
        perform aqueduck._refuse('options has both columns and exclude', 'keep one of them');
    end if;
end
$$;

-- Whether the table has the columns that its options name; the service checks everything else.
create or replace function aqueduck._check_columns(source_oid bigint, parts text[], options jsonb) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    missing text;
begin
    select string_agg(quote_ident(named.name), ', ' order by named.name) into missing
    from (select jsonb_array_elements_text(coalesce(options -> 'columns', options -> 'exclude', '[]'))
          union select jsonb_object_keys(coalesce(options -> 'rename', '{}') || coalesce(options -> 'mask', '{}'))
         ) named (name)
    where not exists (select from pg_catalog.pg_attribute a where a.attrelid = source_oid::oid
        and a.attname = named.name and a.attnum > 0 and not a.attisdropped);
    if missing is not null then
        perform aqueduck._refuse(format('%I.%I has no column %s', parts[1], parts[2], missing),
            'correct the name in its options; capitals count');
    end if;
end
$$;

-- Repeating the same call changes nothing; a different call for an existing table is refused.
drop function if exists aqueduck.add_table(text, text, text, text, boolean);
drop function if exists aqueduck.add_table(text, text, text, text, boolean, text, text);
drop function if exists aqueduck.add_table(text, text, text, text, boolean, text, text, jsonb);
create or replace function aqueduck.add_table(source text, target text default null, group_name text default 'default',
                                              mode text default 'upsert', copy boolean default true,
                                              source_column text default null, source_value text default null,
                                              options jsonb default '{}', adopt boolean default false)
returns bigint language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    parts constant text[] := aqueduck._parse_name(source, 'public', true);
    aim constant text[] := case when target is null then array['main', parts[2]]
        else aqueduck._parse_name(target, 'main', false) end;
    tag constant text := case when source_column is not null then coalesce(source_value, parts[1] || '.' || parts[2]) end;
    in_group aqueduck.sync_groups;
    old aqueduck.table_mappings;
    found_oid bigint;
    made bigint;
begin
    perform aqueduck._begin_change();
    perform aqueduck._check_mode(mode);
    if source_column is null and source_value is not null or source_column = '' then
        perform aqueduck._refuse('source_value needs a source_column', 'name the column of the target that holds it');
    end if;
    perform aqueduck._check_options(options);
    found_oid := aqueduck._check_source(parts, mode);
    if group_name = 'default' then
        perform aqueduck.create_group(group_name);
    end if;
    in_group := aqueduck._group(group_name);
    old := aqueduck._mapping_beside(in_group, found_oid, parts);
    if old.id is not null then
        perform aqueduck._check_same(old, in_group, target is null, aim, mode, source_column, tag, options);
        perform aqueduck._follow_source(old, found_oid, parts, true);
        if adopt and not old.adopt then
            update aqueduck.table_mappings m set adopt = true where m.id = old.id;
            perform aqueduck._notify('add_table', group_name, format('%I.%I', parts[1], parts[2]));
        end if;
        return old.id;
    end if;
    perform aqueduck._check_target(in_group, aim, mode, source_column, tag);
    perform aqueduck._check_columns(found_oid, parts, options);
    insert into aqueduck.table_mappings as m (group_id, source_oid, source_schema, source_table, target_schema,
        target_table, mode, copy, source_column, source_value, options, adopt)
    values (in_group.id, found_oid, parts[1], parts[2], aim[1], aim[2], add_table.mode, add_table.copy,
        add_table.source_column, tag, add_table.options, add_table.adopt)
    returning m.id into made;
    perform aqueduck._notify('add_table', group_name, format('%I.%I', parts[1], parts[2]));
    return made;
end
$$;

drop function if exists aqueduck._check_same(aqueduck.table_mappings, aqueduck.sync_groups, boolean, text[], text);
drop function if exists aqueduck._check_same(aqueduck.table_mappings, aqueduck.sync_groups, boolean, text[], text, text,
    text);
create or replace function aqueduck._check_same(old aqueduck.table_mappings, in_group aqueduck.sync_groups,
                                                any_target boolean, target text[], mode text, source_column text,
                                                source_value text, options jsonb)
returns void language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    shown constant text := format('%I.%I', old.source_schema, old.source_table);
begin
    if old.group_id <> in_group.id then
        perform aqueduck._refuse(format('%s is already synced, in the group %s', shown,
            (select g.name from aqueduck.sync_groups g where g.id = old.group_id)),
            format('select aqueduck.move_table(%L, %L)', shown, in_group.name));
    elsif (old.mode, old.source_column, old.source_value) is distinct from (mode, source_column, source_value)
            or not any_target and (old.target_schema, old.target_table) <> (target[1], target[2]) then
        perform aqueduck._refuse(format('%s is already synced, to %I.%I with the mode %s', shown,
            old.target_schema, old.target_table, old.mode), format('first: select aqueduck.remove_table(%L)', shown));
    elsif old.options <> options then
        perform aqueduck._refuse(format('%s is already synced, with other options', shown),
            format('first: select aqueduck.remove_table(%L)', shown));
    end if;
end
$$;

-- The table was dropped and created again, so it is another table. A new call accepts its rows (`consent`); a
-- file that still names it does not.
drop function if exists aqueduck._follow_source(aqueduck.table_mappings, bigint, text[]);
create or replace function aqueduck._follow_source(old aqueduck.table_mappings, source_oid bigint, parts text[],
                                                   consent boolean)
returns boolean language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    other constant boolean := coalesce(old.source_oid <> source_oid, false) or old.error_code = 'pg.table_recreated';
    wants_copy constant boolean := consent and coalesce(other, false);
begin
    if (old.source_oid, old.source_schema, old.source_table) is not distinct from (source_oid, parts[1], parts[2])
            and not wants_copy then
        return false;
    end if;
    update aqueduck.table_mappings m
    set source_oid = _follow_source.source_oid, source_schema = parts[1], source_table = parts[2],
        resync_requested = m.resync_requested + wants_copy::int
    where m.id = old.id;
    perform aqueduck._notify('add_table', null, format('%I.%I', parts[1], parts[2]));
    return true;
end
$$;

create or replace function aqueduck.remove_table(source text, drop_target boolean default false,
                                                 group_name text default null)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old aqueduck.table_mappings;
begin
    perform aqueduck._begin_change();
    old := aqueduck._mapping(source, group_name);
    update aqueduck.table_mappings m set removed_at = now(), drop_target = remove_table.drop_target where m.id = old.id;
    perform aqueduck._warn_of_file(old.created_by_file, source);
    perform aqueduck._notify('remove_table', group_name, source);
end
$$;

create or replace function aqueduck.move_table(source text, group_name text, from_group text default null)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old aqueduck.table_mappings;
    in_group aqueduck.sync_groups;
    lake text;
begin
    perform aqueduck._begin_change();
    old := aqueduck._mapping(source, from_group);
    in_group := aqueduck._group(group_name);
    if old.group_id = in_group.id then
        return;
    end if;
    select g.lake into lake from aqueduck.sync_groups g where g.id = old.group_id;
    if lake <> in_group.lake then
        perform aqueduck._refuse(format('the group %s fills another lake', group_name),
            'remove the table, and add it to that group');
    end if;
    update aqueduck.table_mappings m set group_id = in_group.id where m.id = old.id;
    perform aqueduck._warn_of_file(old.created_by_file, source);
    perform aqueduck._notify('move_table', group_name, source);
end
$$;

create or replace function aqueduck.resync_table(source text, group_name text default null)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old constant aqueduck.table_mappings := aqueduck._mapping(source, group_name);
begin
    update aqueduck.table_mappings m set resync_requested = m.resync_requested + 1 where m.id = old.id;
    perform aqueduck._notify('resync_table', group_name, source);
end
$$;

create or replace function aqueduck.retry_table(source text, group_name text default null)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old constant aqueduck.table_mappings := aqueduck._mapping(source, group_name);
begin
    update aqueduck.table_mappings m set retry_requested = m.retry_requested + 1 where m.id = old.id;
    perform aqueduck._notify('retry_table', group_name, source);
end
$$;

create or replace function aqueduck._switch_table(source text, group_name text, enabled boolean) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old constant aqueduck.table_mappings := aqueduck._mapping(source, group_name);
begin
    if old.enabled <> enabled then
        update aqueduck.table_mappings m set enabled = _switch_table.enabled where m.id = old.id;
        perform aqueduck._notify(case when enabled then 'enable_table' else 'disable_table' end, group_name, source);
    end if;
end
$$;

create or replace function aqueduck.enable_table(source text, group_name text default null) returns void
language sql set search_path = pg_catalog, pg_temp as $$ select aqueduck._switch_table(source, group_name, true) $$;

create or replace function aqueduck.disable_table(source text, group_name text default null) returns void
language sql set search_path = pg_catalog, pg_temp as $$ select aqueduck._switch_table(source, group_name, false) $$;
