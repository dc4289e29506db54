create table orders (id int primary key, customer text, total numeric(10, 2));
create publication webhook_pub for table orders;
