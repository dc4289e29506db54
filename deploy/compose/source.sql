-- What the source of the example has: a table, and a database for the lake's catalog.
create table public.orders (
    id bigint generated always as identity primary key,
    customer text not null,
    total numeric(12, 2) not null,
    ordered_at timestamptz not null default now()
);
insert into public.orders (customer, total) select 'customer ' || n, n from generate_series(1, 1000) as n;
create database lake;
