"""
The whole service, but for Spark, as a role with the documented rights alone: on the servers that come with the tests (18, 16), and on 15
where the machine has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.sync.check import run_checks
from tests.fix_postgres import Database, _new_database, wait_until
from tests.local_service import local_config, local_service


@pytest.fixture(params=["pg18", "pg16", "pg15"])
def ordinary_db(request: pytest.FixtureRequest) -> Iterator[Database]:
    database = _new_database(request.getfixturevalue(request.param))
    yield database
    database.drop()


@pytest.mark.usefixtures("without_spark")
def test_the_documented_rights_are_enough(ordinary_db: Database, tmp_path: Path) -> None:
    """`check`, a start with a copy, the stream, a table that is added by SQL and one that is removed: nothing needs a superuser."""
    db = ordinary_db
    db.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    config = local_config(db, tmp_path, {"main": ["public.t"]})
    assert db.query(
        "select rolsuper, rolbypassrls, pg_has_role(rolname, 'postgres', 'member') from pg_roles where rolname = %s",
        [db.service_role()],
    ) == [(False, False, False)]
    assert [result.detail for result in run_checks(config) if not result.ok] == []
    with local_service(db, config) as service:
        service.wait_streaming("public.t")
        db.execute(
            "update t set v = 'b'; alter table t add n int default 7; insert into t values (2, 'c', 8)"
        )
        db.execute("create schema s; create table s.late (id int primary key); insert into s.late values (1)")
        with db.connect(db.service_role()) as operator:
            operator.execute("select aqueduck.add_table('s.late', group_name => 'main')")
        service.wait_streaming("s.late")
        db.execute("insert into s.late values (2)")
        service.wait_same("t")
        db.execute("select aqueduck.remove_table('public.t')")
        service.wait_state("public.t", None)
        wait_until(lambda: service.published("main") == {"s.late"}, "the publication is changed")
