"""
A fault matrix over the control plane: a connection is lost at each of its calls, while tables and groups come and go.

A round takes one table through everything that people can want of it.  At each step one connection, or all, is cut at one kind of
statement, before it or before its answer.  After each step the desired state holds, and no table was taken out that should have stayed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import psycopg
import pytest

from tests.cutter import Cut, Cutter, When, Whose
from tests.fix_postgres import Database, wait_until
from tests.local_service import LocalService, local_config, local_service

pytestmark = pytest.mark.usefixtures("without_spark")

TABLE = "create table {0} (id int primary key, v text); insert into {0} select g, 'old' from generate_series(1, 5) g"
SLOTS = (
    "select slot_name::text from pg_replication_slots where database = current_database() and not temporary"
)
SHARES = 8
"""Of the whole matrix, which takes an hour."""
BASE = {"test": {"customers", "invoices"}, "other": {"orders"}}


@dataclass(frozen=True)
class Step:
    """The request, and where the table `extra` is afterwards."""

    name: str
    statement: str
    group: str | None
    state: str | None = "STREAMING"
    flush_interval_ms: int = 1000
    """Of the group `third`, where there is one."""


STEPS = (
    Step("add", "select aqueduck.add_table('public.extra', group_name => 'test')", "test"),
    Step("disable", "select aqueduck.disable_table('public.extra')", "test", "PENDING"),
    Step("enable", "select aqueduck.enable_table('public.extra')", "test"),
    Step("resync", "select aqueduck.resync_table('public.extra')", "test"),
    Step("move", "select aqueduck.move_table('public.extra', 'other')", "other"),
    Step("move back", "select aqueduck.move_table('public.extra', 'test')", "test"),
    Step("remove", "select aqueduck.remove_table('public.extra', drop_target => true)", None, None),
    Step("a new group", "select aqueduck.create_group('third'); select aqueduck.add_table('public.extra', group_name => 'third')", "third"),
    Step("its settings", "select aqueduck.set_setting('flush_interval_ms', '100', group_name => 'third')", "third", "STREAMING", 100),
    Step("disable group", "select aqueduck.disable_group('third')", "third", "PENDING"),
    Step("enable group", "select aqueduck.enable_group('third')", "third", "STREAMING", 100),
    Step("drop group", "select aqueduck.drop_group('third', with_tables => true)", None, None),
)  # fmt: skip


@dataclass
class Matrix:
    """The service, the cutter, and the checks after each step."""

    db: Database
    service: LocalService
    cutter: Cutter
    kinds: dict[str, list[str]] = field(default_factory=dict)
    """Statements of each step, as a round without cuts showed them."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(100))

    def begin(self) -> None:
        self.service.wait_streaming("public.customers", "public.invoices", "public.orders", seconds=60)
        self.marks = self.published_marks()
        assert {t for tables in BASE.values() for t in tables} == set(self.marks)

    def published_marks(self) -> dict[str, int]:
        """The rows of the catalog that publish the tables of the base: others, once a table was taken out."""
        base = """
            select c.relname::text, r.oid::int8 from pg_publication_rel r
            join pg_class c on c.oid = r.prrelid where c.relname <> 'extra'
        """
        return dict(self.db.query(base))

    def learn(self) -> None:
        """A round without cuts."""
        for step in STEPS:
            self.cutter.forget()
            self.take(step, None)
            self.kinds[step.name] = list(self.cutter.statements)

    def take(self, step: Step, cut: Cut | None) -> None:
        self.cutter.arm(cut)
        self.db.execute(step.statement)
        try:
            self.settle(step)
        except AssertionError as exc:
            raise AssertionError(f"after {step.name!r} with {cut}: {exc}") from None
        finally:
            self.cutter.arm(None)

    def settle(self, step: Step) -> None:
        """As it is wanted, with new rows everywhere; and no table of the base was ever out of its publication."""
        number = next(self.numbers)
        followed = ["customers", "invoices", "orders", *(["extra"] if step.state == "STREAMING" else [])]
        for table in ("customers", "invoices", "orders", "extra"):
            self.db.execute(f"insert into {table} values ({number}, 'new')")
        wait_until(lambda: self.as_wanted(step), f"it is as wanted: {self.seen()}", 40, log=self.seen)
        self.service.wait_same(*followed, seconds=40)
        assert self.published_marks() == self.marks, "a table of the base was taken out of its publication"

    def as_wanted(self, step: Step) -> bool:
        self.service.alive()
        published = {group: set(tables) for group, tables in BASE.items()}
        if step.group is not None:
            published.setdefault(step.group, set()).add("extra")
        found = {
            g: {t.removeprefix("public.") for t in self.service.published(g)}
            for g in ("test", "other", "third")
        }
        states = {s: self.service.state(f"public.{s}") for s in ("customers", "invoices", "orders", "extra")}
        wanted = dict.fromkeys(("customers", "invoices", "orders"), "STREAMING") | {"extra": step.state}
        slots = {slot for (slot,) in self.db.query(SLOTS)}
        return (
            {g: t for g, t in found.items() if t} == published
            and states == wanted
            and self.interval() in (None, step.flush_interval_ms)
            and slots == {f"aqueduck_{group}" for group in {*BASE, *([step.group] if step.group else [])}}
            and not self.db.query("select from aqueduck.table_mappings where removed_at is not null")
        )

    def interval(self) -> int | None:
        """The setting that a running group `third` has."""
        runner = self.service.service.running.get("third")
        return None if runner is None else runner.group.flush_interval_ms

    def seen(self) -> str:
        rows = self.db.query(
            "select group_name, source, state, error_code, error_message from aqueduck.status()"
        )
        return f"{rows} {[self.service.published(g) for g in ('test', 'other', 'third')]} {self.service.service.source_error}"


@pytest.fixture
def matrix(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Matrix]:
    monkeypatch.setattr("aqueduck.model.retries.RESTART_SECONDS", (0.1,))
    monkeypatch.setattr("aqueduck.sync.service.RESTART_SECONDS", (0.1,))
    monkeypatch.setattr("aqueduck.sync.service.ERRORED_SECONDS", 0.5)
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 0.3)
    monkeypatch.setattr("aqueduck.model.lifecycle.FIRST_SECONDS", 0.1)
    for name in ("customers", "invoices", "orders", "extra"):
        db.execute(TABLE.format(name))
    config = local_config(db, tmp_path, {"test": ["public.customers"], "other": ["public.orders"]})
    with contextlib.closing(psycopg.connect(db.dsn, autocommit=True, application_name="observer")) as admin:
        cutter = Cutter(db, admin)
        cutter.install(monkeypatch)
        with local_service(db, config) as service:
            db.execute("select aqueduck.add_table('public.invoices', group_name => 'test')")
            made = Matrix(db, service, cutter)
            made.begin()
            made.learn()
            yield made


def cuts_of(matrix: Matrix, seed: int) -> Iterator[dict[str, Cut]]:
    """Rounds that together cut at every statement of every step, in a random order."""
    random_one = random.Random(seed)
    left = {}
    for step in STEPS:
        left[step.name] = [
            Cut(*c) for c in itertools.product(matrix.kinds[step.name], get_args(When), get_args(Whose))
        ]
        random_one.shuffle(left[step.name])
    while any(left.values()):
        yield {name: cuts.pop() for name, cuts in left.items() if cuts}


def run(matrix: Matrix, rounds: slice) -> None:
    armed = 0
    for cuts in list(cuts_of(matrix, 1))[rounds]:
        armed += len(cuts)
        for step in STEPS:
            matrix.take(step, cuts.get(step.name))
    assert len(matrix.cutter.fired) > armed // 2


def test_connections_are_lost_while_tables_come_and_go(matrix: Matrix) -> None:
    """P-T02: a sample of the matrix."""
    run(matrix, slice(1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(SHARES))
def test_connections_are_lost_at_every_call(matrix: Matrix, share: int) -> None:
    """P-T02: the whole matrix, in shares."""
    run(matrix, slice(share, None, SHARES))
