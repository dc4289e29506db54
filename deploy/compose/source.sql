-- What the source of the example has: a table with an owner of its own, the role of the service, and a database for the
-- lake's catalog. It runs once, when the volume is new.
\getenv password AQUEDUCK_PASSWORD
create role shop nologin;
create role aqueduck login replication password :'password';
grant create on database shop to aqueduck; -- its registry and publications
grant shop to aqueduck; -- only the owner of a table may publish it

create table public.orders (
    id bigint generated always as identity primary key,
    customer text not null,
    total numeric(12, 2) not null,
    ordered_at timestamptz not null default now()
);
insert into public.orders (customer, total) select 'customer ' || n, n from generate_series(1, 1000) as n;
alter table public.orders owner to shop;

create database lake owner aqueduck;
revoke all on database lake from public;
