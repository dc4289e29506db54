create table customers (id int primary key, name text not null, country text not null);
create table orders (id bigint primary key, customer_id int not null references customers, total numeric(10, 2), placed_at timestamptz not null);

insert into customers select g, 'customer ' || g, (array['CH', 'FR', 'IT'])[1 + g % 3] from generate_series(1, 300) g;
insert into orders select g, 1 + g % 300, g % 97 + 0.5, timestamptz '2026-01-01' + g * interval '1 minute' from generate_series(1, 5000) g;
