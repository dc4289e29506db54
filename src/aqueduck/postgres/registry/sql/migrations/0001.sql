-- The registry's tables.  What people want ("desired") is written by the functions, what is
-- ("observed") by the service alone.  A released file is never changed: add the next number.

create table aqueduck.schema_version (
    one_row boolean primary key default true check (one_row),
    version int not null,
    functions_hash text not null default '',
    installed_at timestamptz not null default now(),
    installed_by text not null default current_user
);

create table aqueduck.settings (
    name text primary key,
    value jsonb not null,
    changed_at timestamptz not null default now(),
    changed_by text not null default current_user
);
comment on table aqueduck.settings is 'Settings that hold for every group; written by aqueduck.set_setting.';

create table aqueduck.sync_groups (
    id bigint generated always as identity primary key,
    name text not null unique check (name ~ '^[a-z0-9_]{1,40}$'),
    publication text not null unique check (length(publication) between 1 and 63),
    slot_name text not null unique check (slot_name ~ '^[a-z0-9_]{1,63}$'),
    capture text not null default 'stream' check (capture in ('stream', 'poll', 'auto')),
    -- The data path of the lake that the group fills; null until a service has taken the group.
    lake text,
    settings jsonb not null default '{}',
    -- What of the settings the file said when it was last read.
    file_settings jsonb not null default '{}',
    enabled boolean not null default true,
    created_by_file boolean not null default false,
    created_at timestamptz not null default now(),
    removed_at timestamptz,
    -- observed
    confirmed_flush_lsn pg_lsn,
    last_sync_at timestamptz,
    paused boolean not null default false,
    staged_bytes bigint not null default 0,
    restarts int not null default 0,
    error_code text,
    error_message text
) with (fillfactor = 50);
comment on table aqueduck.sync_groups is 'Tables that share a slot, a publication and a streaming query.';

create table aqueduck.table_mappings (
    id bigint generated always as identity primary key,
    group_id bigint not null references aqueduck.sync_groups,
    -- Null while the file names a table that does not exist.
    source_oid bigint,
    source_schema text not null,
    source_table text not null,
    target_schema text not null,
    target_table text not null,
    mode text not null check (mode in ('upsert', 'append')),
    copy boolean not null,
    settings jsonb not null default '{}',
    file_settings jsonb not null default '{}',
    enabled boolean not null default true,
    created_by_file boolean not null default false,
    created_at timestamptz not null default now(),
    removed_at timestamptz,
    drop_target boolean not null default false,
    -- Requests are counted: one is open while "requested" is ahead of "done".
    resync_requested int not null default 0,
    retry_requested int not null default 0,
    -- observed
    resync_done int not null default 0,
    retry_done int not null default 0,
    -- The group whose query carries the table; behind group_id while the table is being moved.
    active_group_id bigint references aqueduck.sync_groups on delete set null,
    state text not null default 'PENDING'
        check (state in ('PENDING', 'SNAPSHOT', 'CATCHUP', 'STREAMING', 'ERRORED')),
    state_since timestamptz not null default now(),
    snapshot_lsn pg_lsn,
    applied_lsn pg_lsn,
    error_code text,
    error_class text check (error_class in ('transient', 'configuration', 'resource')),
    error_message text,
    retry_at timestamptz,
    consecutive_failures int not null default 0,
    rows_synced bigint not null default 0,
    queued_changes bigint not null default 0,
    queued_bytes bigint not null default 0,
    last_sync_at timestamptz,
    lag_bytes bigint not null default 0,
    lag_seconds float8 not null default 0,
    copy_rows bigint not null default 0,
    copy_bytes bigint not null default 0,
    copy_bytes_total bigint,
    copy_started_at timestamptz,
    copy_finished_at timestamptz,
    parked_rows bigint not null default 0,
    parked_bytes bigint not null default 0,
    parked_since timestamptz
) with (fillfactor = 50);
comment on table aqueduck.table_mappings is 'Source tables, where they go, and how far they are.';

-- None of these has an observed column: writing those stays cheap (HOT).
create unique index table_mappings_source on aqueduck.table_mappings (source_oid, group_id)
    where removed_at is null;
create index table_mappings_name on aqueduck.table_mappings (source_schema, source_table)
    where removed_at is null;
create index table_mappings_target on aqueduck.table_mappings (lower(target_schema), lower(target_table))
    where removed_at is null;
create index table_mappings_group on aqueduck.table_mappings (group_id);
