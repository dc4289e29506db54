-- The observed state, for every role that may read the registry's tables.

-- The current name; the last name if the table no longer exists.
create or replace function aqueduck._source_name(m aqueduck.table_mappings) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce((select format('%I.%I', n.nspname, c.relname) from pg_catalog.pg_class c
                     join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = m.source_oid::oid),
                    format('%I.%I', m.source_schema, m.source_table))
$$;

-- A time that programs can read; NULL for an infinite one, which no service writes.
create or replace function aqueduck._readable(value timestamptz) returns timestamptz
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select case when value between '0001-01-02 00:00+00' and '9999-12-30 00:00+00' then value end
$$;

-- A table that no query replicates now is pending, even if a service last wrote another state.
create or replace function aqueduck._state(m aqueduck.table_mappings, running boolean) returns text
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select case when m.state in ('SNAPSHOT', 'CATCHUP', 'STREAMING') and not running then 'PENDING' else m.state end
$$;

create or replace function aqueduck.status()
returns table (
    group_name text, source text, target text, mode text, source_column text, source_value text,
    state text, state_since timestamptz, enabled boolean, running boolean,
    rows_synced bigint, queued_changes bigint, queued_bytes bigint, last_sync_at timestamptz,
    error_code text, error_class text, error_message text, consecutive_failures int, retry_at timestamptz,
    snapshot_lsn pg_lsn, applied_lsn pg_lsn, lag_bytes bigint, lag_seconds float8,
    copy_rows bigint, copy_bytes bigint, copy_bytes_total bigint, copy_share float8, copy_seconds float8,
    copy_seconds_left float8, parked_rows bigint, parked_bytes bigint, parked_since timestamptz,
    verdict text, verified_at timestamptz, identical_at timestamptz, differences bigint, verify_note text)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select g.name, aqueduck._source_name(m), format('%I.%I', m.target_schema, m.target_table), m.mode,
           m.source_column, m.source_value, aqueduck._state(m, r.running), aqueduck._readable(m.state_since), m.enabled and g.enabled,
           r.running,
           m.rows_synced, m.queued_changes, m.queued_bytes, aqueduck._readable(m.last_sync_at),
           m.error_code, m.error_class, m.error_message, m.consecutive_failures, aqueduck._readable(m.retry_at),
           m.snapshot_lsn, m.applied_lsn, m.lag_bytes, m.lag_seconds,
           m.copy_rows, m.copy_bytes, m.copy_bytes_total, p.share, p.seconds,
           case when m.copy_finished_at is null and p.share > 0 then p.seconds * (1 - p.share) / p.share end,
           m.parked_rows, m.parked_bytes, aqueduck._readable(m.parked_since),
           m.verdict, aqueduck._readable(m.verified_at), aqueduck._readable(m.identical_at), m.differences, m.verify_note
    from aqueduck.table_mappings m join aqueduck.sync_groups g on g.id = m.group_id
    cross join lateral (select g.id = any (array(select aqueduck._running_groups())) as running) r
    cross join lateral (
        select case when m.copy_finished_at is not null then 1.0
                    -- The total is an estimate: the ratio of a growing table stays at most 1.
                    when m.copy_bytes_total > 0 then least(m.copy_bytes::float8 / m.copy_bytes_total, 1.0) end as share,
               extract(epoch from coalesce(aqueduck._readable(m.copy_finished_at), now()) - aqueduck._readable(m.copy_started_at))::float8 as seconds
    ) p
    where m.removed_at is null order by g.name, m.source_schema, m.source_table
$$;

create or replace function aqueduck.tables()
returns table (id bigint, group_name text, source text, target text, mode text, source_column text, source_value text,
               copy boolean, enabled boolean, state text, options jsonb, settings jsonb, created_by_file boolean,
               created_at timestamptz)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select m.id, g.name, aqueduck._source_name(m), format('%I.%I', m.target_schema, m.target_table), m.mode,
           m.source_column, m.source_value, m.copy, m.enabled, aqueduck._state(m, r.running), m.options, m.settings,
           m.created_by_file, aqueduck._readable(m.created_at)
    from aqueduck.table_mappings m join aqueduck.sync_groups g on g.id = m.group_id
    cross join lateral (select g.id = any (array(select aqueduck._running_groups())) as running) r
    where m.removed_at is null order by g.name, m.source_schema, m.source_table
$$;

create or replace function aqueduck.groups()
returns table (
    name text, enabled boolean, running boolean, tables bigint, tables_errored bigint, capture text, publication text,
    slot_name text, slot_active boolean, wal_status text, confirmed_flush_lsn pg_lsn, retained_bytes bigint,
    staged_bytes bigint, paused boolean, last_sync_at timestamptz, restarts int, error_code text, error_message text,
    lake text, settings jsonb, created_by_file boolean, note text)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select g.name, g.enabled, r.running, t.tables, t.errored, g.capture, g.publication,
           g.slot_name, s.active, s.wal_status, coalesce(s.confirmed_flush_lsn, g.confirmed_flush_lsn), w.retained,
           g.staged_bytes, g.paused, aqueduck._readable(g.last_sync_at), g.restarts, g.error_code, g.error_message,
           g.lake, g.settings, g.created_by_file,
           case when s.wal_status = 'lost' then 'the slot is lost: its tables need a new copy'
                when s.slot_name is not null and t.tables = 0
                    then format('has no tables, but its slot keeps %s of WAL: add a table or drop the group',
                                pg_size_pretty(w.retained))
                when s.slot_name is not null and not g.enabled
                    then format('disabled: its slot keeps %s of WAL', pg_size_pretty(w.retained))
                when s.slot_name is not null and not r.running
                    then format('no service runs it: its slot keeps %s of WAL', pg_size_pretty(w.retained))
                when g.enabled and not r.running then 'no service runs it'
                when g.paused then 'reading is paused until the lake has caught up' end
    from aqueduck.sync_groups g
    cross join lateral (select g.id = any (array(select aqueduck._running_groups())) as running) r
    cross join lateral (
        select count(*) as tables, count(*) filter (where m.state = 'ERRORED') as errored
        from aqueduck.table_mappings m where m.group_id = g.id and m.removed_at is null) t
    left join pg_catalog.pg_replication_slots s on s.slot_name = g.slot_name and s.database = current_database()
    cross join lateral (
        select pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end,
                               s.restart_lsn)::bigint as retained) w
    where g.removed_at is null order by g.name
$$;
