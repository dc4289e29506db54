create table customers (id int primary key, name text, country text);
create table orders (id int primary key, customer int not null, amount numeric(10, 2));

insert into customers select g, 'customer ' || g, (array['CH', 'FR', 'IT'])[1 + g % 3] from generate_series(1, 30) g;
create publication sales for table orders;
