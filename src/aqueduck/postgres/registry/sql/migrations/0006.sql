-- Slots, publications and targets of others are not changed or dropped, unless somebody gives them to us ("adopt").

-- The slot and the publication that the service made, or was given; what was in use before counts as made.
alter table aqueduck.sync_groups add column made_slot text, add column made_publication text,
    add column adopt boolean not null default false;
update aqueduck.sync_groups set made_slot = slot_name, made_publication = publication where lake is not null;
alter table aqueduck.table_mappings add column adopt boolean not null default false;
