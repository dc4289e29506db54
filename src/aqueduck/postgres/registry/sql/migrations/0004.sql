-- They have more columns now: the source column of a shared target, and a table's options.
drop function if exists aqueduck.status();
drop function if exists aqueduck.tables();
