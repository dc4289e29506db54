-- What the service's own comparison with the lake last said about a table.
alter table aqueduck.table_mappings
    add column verdict text not null default 'never',
    add column verified_at timestamptz,
    add column identical_at timestamptz,
    add column differences bigint not null default 0,
    add column verify_note text;

-- It has more columns now.
drop function if exists aqueduck.status();
