-- Names, errors and notices. Functions that begin with an underscore are internal. SQLSTATE QD001 is a
-- mistake of the caller, QD002 a table without a key, QD003 a table that is missing or cannot be synced. The
-- search path of each function is `pg_catalog` alone: no function or operator of another schema can run with
-- the caller's rights.

create or replace function aqueduck._refuse(problem text, fix text, state text default 'QD001') returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    raise exception using errcode = state, message = problem, hint = fix;
end
$$;

-- Parses `table` or `schema.table`, either part quoted as in SQL, into an array of both parts.
create or replace function aqueduck._parse_name(written text, default_schema text, fold_case boolean)
returns text[] language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    plain constant text := '([[:alpha:]_][[:alnum:]_$]*)';
    part constant text := '[[:space:]]*(?:"((?:[^"]|"")+)"|' || plain || ')[[:space:]]*';
    found constant text[] := regexp_match(written, '^' || part || '(?:[.]' || part || ')?$');
    first text;
    second text;
begin
    if found is null then
        perform aqueduck._refuse(format('%L is not a table name', written),
            'write orders, public.orders or "My Schema"."Orders"');
    end if;
    -- PostgreSQL folds ASCII letters only.
    first := coalesce(replace(found[1], '""', '"'),
        case when fold_case then lower(found[2] collate "C") else found[2] end);
    second := coalesce(replace(found[3], '""', '"'),
        case when fold_case then lower(found[4] collate "C") else found[4] end);
    return case when second is null then array[default_schema, first] else array[first, second] end;
end
$$;

-- The OID of the table that has this name now; null if there is none. Needs no privilege on its schema.
create or replace function aqueduck._find_oid(parts text[]) returns bigint
language sql stable set search_path = pg_catalog, pg_temp as $$
    select c.oid::bigint from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = parts[1] and c.relname = parts[2]
$$;

create or replace function aqueduck._exists(table_oid bigint) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
    select exists (select from pg_catalog.pg_class c where c.oid::bigint = table_oid)
$$;

-- Of known names, what is `shown` for the most similar one; null if none is similar. Names are compared by their
-- pairs of letters, without regard to case.
create or replace function aqueduck._nearest(name text, known text[], shown text[]) returns text
language sql immutable set search_path = pg_catalog, pg_temp as $$
    with wanted (pairs) as (
        select array_agg(distinct substr(' ' || lower(name) || ' ', i, 2)) from generate_series(1, length(name) + 1) i
    )
    select w.shown from wanted, unnest(_nearest.known, _nearest.shown) w (known, shown)
    cross join lateral (
        select 2.0 * count(*) filter (where p.pair = any (wanted.pairs)) / (count(*) + cardinality(wanted.pairs)) as share
        from (select distinct substr(' ' || lower(w.known) || ' ', i, 2) from generate_series(1, length(w.known) + 1) i
             ) p (pair)
    ) likeness
    where likeness.share >= 0.4 order by likeness.share desc, w.shown limit 1
$$;

-- A table of the database with this name in another schema, or with a similar name, preferably in the same schema.
create or replace function aqueduck._nearest_table(parts text[]) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    with known (schema, name, shown) as (
        select n.nspname::text, c.relname::text, format('%I.%I', n.nspname, c.relname)
        from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where c.relkind in ('r', 'p') and c.relpersistence <> 't' and not c.relispartition
            and n.nspname not in ('aqueduck', 'information_schema') and left(n.nspname, 3) <> 'pg_'
    )
    select coalesce(
        min(k.shown) filter (where lower(k.name) = lower(parts[2])),
        aqueduck._nearest(parts[2], array_agg(k.name) filter (where k.schema = parts[1]),
                          array_agg(k.shown) filter (where k.schema = parts[1])),
        aqueduck._nearest(parts[2], array_agg(k.name), array_agg(k.shown)))
    from known k
$$;

-- Refuses tables that cannot be synced in this mode, by the same rules as the service; returns the OID.
create or replace function aqueduck._check_source(parts text[], mode text) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    shown constant text := format('%I.%I', parts[1], parts[2]);
    it record;
begin
    select c.oid, c.relkind::text as kind, c.relpersistence::text as persistence, c.relreplident::text as identity
    into it from pg_catalog.pg_class c where c.oid::bigint = aqueduck._find_oid(parts);
    if not found then
        perform aqueduck._refuse(format('the table %s does not exist in the database %I', shown, current_database()),
            coalesce('did you mean ' || aqueduck._nearest_table(parts) || '?', 'correct the name, or create the table')
                || '; names with capitals need double quotes', 'QD003');
    elsif it.kind not in ('r', 'p') then
        perform aqueduck._refuse(format('%s is not a table: only ordinary and partitioned tables have changes to replicate',
            shown), 'name a table instead', 'QD003');
    elsif parts[1] in ('aqueduck', 'information_schema') or left(parts[1], 3) = 'pg_' then
        perform aqueduck._refuse(format('%s is a table of the system or of Aqueduck itself', shown),
            'name a table of your own', 'QD003');
    elsif it.persistence <> 'p' then
        perform aqueduck._refuse(format('%s is unlogged or temporary: its changes are not in WAL', shown),
            format('alter table %s set logged', shown), 'QD003');
    elsif not exists (select from pg_catalog.pg_attribute a
            where a.attrelid = it.oid and a.attnum > 0 and not a.attisdropped) then
        perform aqueduck._refuse(format('%s has no columns', shown),
            'add columns and a primary key, or leave the table out', 'QD002');
    elsif mode <> 'append' and (mode <> 'upsert' or it.identity <> 'f') and not aqueduck._has_key(it.oid, it.identity) then
        perform aqueduck._refuse(format('%s has neither a primary key nor a replica identity', shown),
            format('alter table %s add primary key (<columns>); -- or replica identity full'
                ' -- or select aqueduck.add_table(%L, mode => ''append'')', shown, shown), 'QD002');
    end if;
    return it.oid;
end
$$;

-- Whether rows can be identified by columns in the old image; equals the rule in
-- aqueduck.postgres.catalog.tables.
create or replace function aqueduck._has_key(table_oid oid, identity text) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
    select exists (
        select from pg_catalog.pg_index i
        where i.indrelid = table_oid and i.indisvalid and i.indislive and case identity
            when 'i' then i.indisreplident
            when 'f' then i.indisunique and i.indimmediate and i.indpred is null and i.indexprs is null and not exists (
                select from pg_catalog.pg_attribute a where a.attrelid = i.indrelid and not a.attnotnull
                and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
            else i.indisprimary and i.indimmediate end)
$$;

-- Notifies the service, when the transaction commits, that the configuration has changed.
create or replace function aqueduck._notify(what text, group_name text default null, source text default null)
returns void language sql set search_path = pg_catalog, pg_temp as $$
    select pg_notify('aqueduck', json_strip_nulls(
        json_build_object('what', what, 'group', group_name, 'source', source))::text)
$$;

-- Changes wait for each other, so that what they check still holds when they commit. Only roles that may
-- change the table can take the lock, and the service's own reads and writes do not wait for it.
create or replace function aqueduck._begin_change() returns void language sql set search_path = pg_catalog, pg_temp as $$
    lock table aqueduck.settings in share update exclusive mode
$$;
