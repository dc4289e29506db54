create table events (event_id bigint primary key, company text not null, amount numeric(10, 2));

insert into events select g, (array['quacksworth', 'mallardine', 'tealman'])[1 + g % 3], g / 10.0 from generate_series(1, 900) g;
