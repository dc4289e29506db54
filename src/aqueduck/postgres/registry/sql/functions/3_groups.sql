-- Groups: their desired state. The service creates and drops the slots and publications.

create or replace function aqueduck._group(group_name text) returns aqueduck.sync_groups
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    found_group aqueduck.sync_groups;
begin
    select * into found_group from aqueduck.sync_groups g where g.name = group_name and g.removed_at is null;
    if not found then
        perform aqueduck._refuse(format('the group %s does not exist', group_name), coalesce(
            (select 'did you mean ' || aqueduck._nearest(group_name, array_agg(g.name), array_agg(g.name)) || '? to create it: '
             from aqueduck.sync_groups g where g.removed_at is null), '')
            || format('select aqueduck.create_group(%L)', group_name));
    end if;
    return found_group;
end
$$;

-- Key of the advisory lock that the service holds for a group while it runs it; if a foreign role holds that
-- key, the service holds another one with the same upper half.
create or replace function aqueduck._lock_key(group_name text) returns bigint
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select ('x' || encode(substr(sha256(convert_to('aqueduck.group:' || group_name, 'UTF8')), 1, 8), 'hex'))
        ::bit(64)::bigint
$$;

-- The groups that a service runs now. Locks of roles that could not run a service are not counted: every role
-- can take them.
create or replace function aqueduck._running_groups() returns setof bigint
language sql stable set search_path = pg_catalog, pg_temp as $$
    select g.id from aqueduck.sync_groups g
    join pg_catalog.pg_locks l on l.locktype = 'advisory' and l.granted and l.objsubid = 1
        and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
        and l.classid::bigint = (aqueduck._lock_key(g.name) >> 32 & 4294967295)
    join pg_catalog.pg_stat_activity a on a.pid = l.pid
    join pg_catalog.pg_roles r on r.oid = a.usesysid and (r.rolsuper or r.rolreplication or exists (
        select from pg_catalog.pg_roles m where m.rolname = 'rds_replication' and pg_has_role(r.oid, m.oid, 'usage')))
$$;

create or replace function aqueduck._check_group(name text, publication text, slot_name text, capture text)
returns void language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    other record;
begin
    if name is null or name !~ '^[a-z0-9_]{1,40}$' then
        perform aqueduck._refuse(format('the group name %L is not valid', name),
            'use 1 to 40 of the characters a-z, 0-9 and _');
    elsif slot_name !~ '^[a-z0-9_]{1,63}$' then
        perform aqueduck._refuse(format('the slot_name %L is not valid', slot_name),
            'use 1 to 63 of the characters a-z, 0-9 and _');
    elsif length(publication) not between 1 and 63 then
        perform aqueduck._refuse(format('the publication %L is not valid', publication), 'use 1 to 63 characters');
    elsif capture not in ('stream', 'poll', 'auto') then
        perform aqueduck._refuse(format('the capture %L is not valid', capture), 'use stream, poll or auto');
    end if;
    select g.name, g.slot_name into other from aqueduck.sync_groups g where g.name <> _check_group.name
        and (g.slot_name = _check_group.slot_name or g.publication = _check_group.publication) limit 1;
    if found then
        perform aqueduck._refuse(format('the %s belongs to the group %s',
            case when other.slot_name = slot_name then 'slot ' || slot_name else 'publication ' || publication end,
            other.name), 'choose another name for it');
    end if;
end
$$;

drop function if exists aqueduck.create_group(text, text, text, text, text);
create or replace function aqueduck.create_group(name text, publication text default null, slot_name text default null,
                                                 capture text default null, lake text default null,
                                                 adopt boolean default false)
returns bigint language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old aqueduck.sync_groups;
    made bigint;
begin
    perform aqueduck._begin_change();
    select * into old from aqueduck.sync_groups g where g.name = create_group.name;
    if old.id is not null and old.removed_at is null then
        if old.publication <> publication or old.slot_name <> slot_name or old.capture <> capture
                or old.lake <> lake then
            perform aqueduck._refuse(format('the group %s exists already, with other properties', name),
                'select * from aqueduck.groups()');
        end if;
        if adopt and not old.adopt then
            update aqueduck.sync_groups g set adopt = true where g.id = old.id;
            perform aqueduck._notify('create_group', name);
        end if;
        return old.id;
    end if;
    publication := coalesce(publication, old.publication, 'aqueduck_' || name);
    slot_name := coalesce(slot_name, old.slot_name, 'aqueduck_' || name);
    capture := coalesce(capture, old.capture, 'auto');
    perform aqueduck._check_group(name, publication, slot_name, capture);
    -- A group that was dropped, but that no service has taken down yet, is restored unchanged.
    insert into aqueduck.sync_groups as g (name, publication, slot_name, capture, lake, adopt)
    values (create_group.name, create_group.publication, create_group.slot_name, create_group.capture, create_group.lake,
        create_group.adopt)
    on conflict on constraint sync_groups_name_key do update set removed_at = null, enabled = true, created_by_file = false,
        publication = excluded.publication, slot_name = excluded.slot_name, capture = excluded.capture,
        lake = coalesce(excluded.lake, g.lake), adopt = excluded.adopt
    returning g.id into made;
    perform aqueduck._notify('create_group', name);
    return made;
end
$$;

create or replace function aqueduck.drop_group(name text, with_tables boolean default false)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old aqueduck.sync_groups;
    tables bigint;
begin
    perform aqueduck._begin_change();
    old := aqueduck._group(name);
    select count(*) into tables from aqueduck.table_mappings m where m.group_id = old.id and m.removed_at is null;
    if tables > 0 and not with_tables then
        perform aqueduck._refuse(format('the group %s has %s tables', name, tables),
            format('move or remove them first, or: select aqueduck.drop_group(%L, with_tables => true)', name));
    end if;
    update aqueduck.table_mappings m set removed_at = now() where m.group_id = old.id and m.removed_at is null;
    update aqueduck.sync_groups g set removed_at = now() where g.id = old.id;
    perform aqueduck._warn_of_file(old.created_by_file, 'the group ' || name);
    perform aqueduck._notify('drop_group', name);
end
$$;

create or replace function aqueduck._warn_of_file(created_by_file boolean, what text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if created_by_file then
        raise notice '% is in the configuration file: change that too, or the next start undoes this', what;
    end if;
end
$$;

create or replace function aqueduck._switch_group(name text, enabled boolean) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old aqueduck.sync_groups;
begin
    perform aqueduck._begin_change();
    old := aqueduck._group(name);
    if old.enabled <> enabled then
        update aqueduck.sync_groups g set enabled = _switch_group.enabled where g.id = old.id;
        perform aqueduck._notify(case when enabled then 'enable_group' else 'disable_group' end, name);
    end if;
end
$$;

create or replace function aqueduck.enable_group(name text) returns void
language sql set search_path = pg_catalog, pg_temp as $$ select aqueduck._switch_group(name, true) $$;

create or replace function aqueduck.disable_group(name text) returns void
language sql set search_path = pg_catalog, pg_temp as $$ select aqueduck._switch_group(name, false) $$;

create or replace function aqueduck.release_group(name text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    old aqueduck.sync_groups;
begin
    perform aqueduck._begin_change();
    old := aqueduck._group(name);
    if old.id in (select aqueduck._running_groups()) then
        perform aqueduck._refuse(format('a service runs the group %s right now', name), 'stop that service first');
    end if;
    update aqueduck.sync_groups g set lake = null where g.id = old.id;
    perform aqueduck._notify('release_group', name);
end
$$;
