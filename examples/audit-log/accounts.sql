create table accounts (id int primary key, owner text not null, balance numeric(12, 2) not null);
alter table accounts replica identity full;

insert into accounts values (1, 'Ada', 100), (2, 'Grace', 250), (3, 'Alan', 0);
