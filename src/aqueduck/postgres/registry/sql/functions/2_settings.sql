-- Settings: names, ranges, defaults, and their resolution from global over group to table.

create or replace function aqueduck._setting_definitions()
returns table (name text, kind text, default_value jsonb, lowest bigint, highest bigint, choices text[],
               levels text[], description text)
language sql immutable set search_path = pg_catalog, pg_temp as $$
    values
        ('flush_interval_ms', 'integer', '1000'::jsonb, 0, 3600000, null::text[], '{global,group}'::text[],
         'How often a batch starts; 0 starts each right after the last one.'),
        ('stage_bytes_max', 'bytes', '1073741824', 1, 1::bigint << 50, null, '{global,group}',
         'How much may wait on disk between PostgreSQL and the lake; a full stage pauses reading.'),
        ('batch_bytes_max', 'bytes', '536870912', 1, 1::bigint << 50, null, '{global,group}',
         'How much a batch takes from the stage.'),
        ('segment_bytes', 'bytes', '33554432', 1, 1::bigint << 40, null, '{global,group}',
         'Size at which a staged file of one table is closed.'),
        ('max_queued_changes', 'integer', '10000000', 1, 1000000000000, null, '{global,group}',
         'How many changes may wait on disk; more pause reading.'),
        ('fold_concurrency', 'integer', '64', 1, 1024, null, '{global,group}',
         'How many tasks of a batch run at the same time, within what Spark has; more work than that is done one after the other.'),
        ('task_memory', 'bytes', '160000000', 67108864, 1::bigint << 40, null, '{global,group}',
         'How much memory DuckDB may use in one task, of a batch or of a copy; what needs more goes through temporary files.'),
        ('copy_concurrency', 'integer', '2', 1, 64, null, '{global,group}',
         'How many tables of a group are copied at the same time.'),
        ('copy_chunk_bytes', 'bytes', '67108864', 8192, 1::bigint << 40, null, '{global,group}',
         'Size of the pieces in which a table is copied; what an interrupted copy has to do again is at most one for each task.'),
        ('inline_rows', 'integer', '1000', 0, 1000000, null, '{global,group,table}',
         'A batch with at most this many rows for a table is stored in the catalog in place of a small file.'),
        ('on_slot_loss', 'choice', '"stop"', null, null, '{stop,resync}', '{global,group}',
         'What happens when the slot is gone: stop with an error, or copy the tables again.'),
        ('on_type_change', 'choice', '"resync"', null, null, '{resync,stop}', '{global,group}',
         'What happens after a change of a source table that cannot be applied: copy the table again, or stop it with an error.'),
        ('large_transactions', 'choice', '"stream"', null, null, '{stream,whole}', '{global,group}',
         'Whether transactions beyond the server''s logical_decoding_work_mem are read in progress, or whole after their commit.'),
        ('on_partition_change', 'choice', '"resync"', null, null, '{resync,keep}', '{global,group}',
         'What happens after a partition came or went with its rows: copy the table again, or keep what the lake has.'),
        ('on_recreate', 'choice', '"stop"', null, null, '{stop,resync}', '{global,group}',
         'What happens after a source table was dropped and created anew: stop it with an error, or copy the new one.'),
        ('heartbeat_interval_ms', 'integer', '0', 0, 3600000, null, '{global,group}',
         'How often a small message is written to WAL, so that the slot moves while only other databases are busy; 0 never.'),
        ('publication_by', 'choice', '"aqueduck"', null, null, '{aqueduck,user}', '{global,group}',
         'Who says what the publication sends: aqueduck makes it send the group''s tables whole, user leaves it as it is.'),
        ('plugin', 'choice', '"pgoutput"', null, null, '{pgoutput,test_decoding}', '{global,group}',
         'What decodes WAL on the server; test_decoding is read by polling.'),
        ('poll_interval_ms', 'integer', '100', 10, 60000, null, '{global,group}',
         'How often the capture poll looks for changes; less often while there are none.'),
        ('poll_step_bytes', 'bytes', '67108864', 65536, 1::bigint << 40, null, '{global,group}',
         'How much WAL one read by SQL decodes.'),
        ('catchup_bytes', 'bytes', '16777216', 1, 1::bigint << 50, null, '{global,group}',
         'With the capture auto, a larger backlog is read by SQL before streaming resumes.')
$$;

-- A number of bytes, written like 33554432, 512 MiB or 1GB.
create or replace function aqueduck._parse_bytes(written text) returns numeric
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select trunc(found[1]::numeric * case lower(found[2])
        when '' then 1 when 'b' then 1
        when 'kb' then 1e3 when 'mb' then 1e6 when 'gb' then 1e9 when 'tb' then 1e12
        when 'kib' then 1024 when 'mib' then 1048576 when 'gib' then 1073741824 when 'tib' then 1099511627776 end)
    from regexp_match(written, '^[[:space:]]*([0-9]{1,18}(?:[.][0-9]{1,9})?)[[:space:]]*([a-zA-Z]{0,3})[[:space:]]*$') found
$$;

-- The value as it is stored; unknown names and invalid values are refused by name.
create or replace function aqueduck._check_setting(name text, value text, level text) returns jsonb
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    known record;
    number numeric;
begin
    select * into known from aqueduck._setting_definitions() d where d.name = _check_setting.name;
    if not found then
        perform aqueduck._refuse(format('unknown setting %s', name), 'known settings: '
            || (select string_agg(d.name, ', ' order by d.name) from aqueduck._setting_definitions() d));
    elsif level <> all (known.levels) then
        perform aqueduck._refuse(format('%s cannot be set for a %s', name, level),
            format('it can be set at the level: %s', array_to_string(known.levels, ', ')));
    elsif known.kind = 'choice' then
        if value is null or value <> all (known.choices) then
            perform aqueduck._refuse(format('%s must be %s', name, array_to_string(known.choices, ' or ')),
                format('the default is %s', known.default_value #>> '{}'));
        end if;
        return to_jsonb(value);
    end if;
    number := case known.kind when 'bytes' then aqueduck._parse_bytes(value)
        else (regexp_match(value, '^[[:space:]]*([+-]?[0-9]{1,18})[[:space:]]*$'))[1]::numeric end;
    if number is null or number not between known.lowest and known.highest then
        perform aqueduck._refuse(format('%s must be a number%s from %s to %s', name,
            case known.kind when 'bytes' then ' of bytes, such as 33554432 or 32 MiB,' else '' end,
            known.lowest, known.highest), format('the default is %s', known.default_value));
    end if;
    return to_jsonb(number::bigint);
end
$$;

-- All settings of one level as one object, without the values of the levels above.
create or replace function aqueduck._check_settings(given jsonb, level text) returns jsonb
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(jsonb_object_agg(key, aqueduck._check_setting(key, value, level)), '{}')
    from jsonb_each_text(given)
$$;

-- The settings of every group: the defaults, overridden by global values.
create or replace function aqueduck._global_settings() returns jsonb
language sql stable set search_path = pg_catalog, pg_temp as $$
    select (select jsonb_object_agg(d.name, d.default_value) from aqueduck._setting_definitions() d)
        || coalesce((select jsonb_object_agg(s.name, s.value) from aqueduck.settings s), '{}')
$$;

create or replace function aqueduck.get_setting(name text, group_name text default null, source text default null)
returns text language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    mapping aqueduck.table_mappings;
    effective jsonb := aqueduck._global_settings();
begin
    if not effective ? name then
        perform aqueduck._check_setting(name, null, 'global');
    end if;
    if source is not null then
        mapping := aqueduck._mapping(source, group_name);
        select effective || g.settings || mapping.settings into effective
        from aqueduck.sync_groups g where g.id = mapping.group_id;
    elsif group_name is not null then
        effective := effective || (aqueduck._group(group_name)).settings;
    end if;
    return effective ->> name;
end
$$;

create or replace function aqueduck.set_setting(name text, value text, group_name text default null,
                                                source text default null)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    level constant text := case when source is not null then 'table' when group_name is not null then 'group'
        else 'global' end;
    mapping aqueduck.table_mappings;
    in_group aqueduck.sync_groups;
    -- Null resets the setting; its name is checked all the same.
    change jsonb := '{}';
    checked jsonb;
begin
    checked := aqueduck._check_setting(name, coalesce(value, (
        select d.default_value #>> '{}' from aqueduck._setting_definitions() d where d.name = set_setting.name)), level);
    if value is not null then
        change := jsonb_build_object(name, checked);
    end if;
    perform aqueduck._begin_change();
    if level = 'table' then
        mapping := aqueduck._mapping(source, group_name);
        update aqueduck.table_mappings m set settings = m.settings - set_setting.name || change
        where m.id = mapping.id;
    elsif level = 'group' then
        in_group := aqueduck._group(group_name);
        update aqueduck.sync_groups g set settings = g.settings - set_setting.name || change
        where g.id = in_group.id;
    elsif value is null then
        delete from aqueduck.settings s where s.name = set_setting.name;
    else
        insert into aqueduck.settings as s (name, value) values (set_setting.name, checked)
        on conflict on constraint settings_pkey
        do update set value = excluded.value, changed_at = now(), changed_by = current_user;
    end if;
    perform aqueduck._notify('set_setting', group_name, source);
end
$$;

create or replace function aqueduck.set_setting(name text, value bigint, group_name text default null,
                                                source text default null)
returns void language sql set search_path = pg_catalog, pg_temp as $$
    select aqueduck.set_setting(name, value::text, group_name, source)
$$;

create or replace function aqueduck.list_settings()
returns table (name text, value text, default_value text, lowest bigint, highest bigint, choices text[],
               levels text[], description text)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select d.name, coalesce(s.value, d.default_value) #>> '{}', d.default_value #>> '{}', d.lowest, d.highest,
           d.choices, d.levels, d.description
    from aqueduck._setting_definitions() d left join aqueduck.settings s using (name) order by d.name
$$;
