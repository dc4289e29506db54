"""Random histories over the cross product of modes, options, fan-in, identities, partitions and readers, against `mode_model`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import mode_model as model
from tests.fix_postgres import Database
from tests.mode_model import MISSING, Row, Shown, SourceTable
from tests.whole_group import WholeGroup, whole_group

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {
        "exclude": ["secret"],
        "rename": {"n": "amount"},
        "mask": {"v": "hash", "doc": "hash", "note": "redact"},
    },
    "hashed": {"columns": ["id", "n", "doc", "v", "note", "secret"], "mask": {"id": "hash"}},
    "filtered": {"exclude": ["note"], "where": "n % 3 <> 0"},
}
LAYOUTS = ("keyed", "full", "partitioned", "keyless")
MODES = ("upsert", "append", "history", "soft_delete")


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SALT", model.SALT)


def product() -> list[tuple[str, str, str, bool]]:
    """All allowed combinations of mode, layout, options and sharing."""
    found = itertools.product(MODES, LAYOUTS, OPTIONS, (False, True))
    return [
        (mode, layout, options, shared)
        for mode, layout, options, shared in found
        if not (
            layout == "keyless" and (mode in ("history", "soft_delete") or options in ("hashed", "filtered"))
        )
        and not (options == "filtered" and (mode != "upsert" or layout in ("keyed", "partitioned")))
    ]


class World:
    """Tables of many kinds in one group; those that share have a twin in the same target."""

    def __init__(self, db: Database, kinds: list[tuple[str, str, str, bool]], dice: random.Random) -> None:
        self.db, self.dice = db, dice
        self.sources: list[tuple[SourceTable, Shown, str, dict[str, Any]]] = []
        for number, (mode, layout, options, shared) in enumerate(kinds):
            for twin in ("a", "b") if shared else ("",):
                name = f"t{number}{twin}"
                identity = "full" if layout == "full" else "default"
                table = SourceTable(db, name, layout, identity)
                wanted = {"mode": mode, "target": f"main.lake{number}", **OPTIONS[options]}
                if shared:
                    wanted |= {"source_column": "src", "source_value": twin}
                self.sources.append((table, Shown(OPTIONS[options]), mode, wanted))

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        return {table.name: wanted for table, _, _, wanted in self.sources}

    def transaction(self) -> None:
        """A few statements, some in subtransactions that end in nothing; now and then so many that it is streamed."""
        dice = self.dice
        some = [table for table, *_ in self.sources if dice.random() < 0.5]
        self.db.execute("begin")
        for table in some:
            table.begin()
        for _ in range(dice.randrange(1, 4)):
            nested = dice.random() < 0.4
            if nested:
                self._all(some, "savepoint s", SourceTable.savepoint)
            for table in some:
                for _ in range(dice.randrange(0, 5)):
                    table.step(dice)
                if dice.random() < 0.1:
                    for key in range(100, 140):
                        table.insert(dice, key, "x" * model.LARGE)
            if nested and dice.random() < 0.5:
                self._all(some, "rollback to savepoint s; release savepoint s", SourceTable.rollback_to)
            elif nested:
                self._all(some, "release savepoint s", SourceTable.release)
        commit = dice.random() < 0.85
        self.db.execute("commit" if commit else "rollback")
        for table in some:
            table.end(commit)

    def _all(self, tables: list[SourceTable], statement: str, what: Any) -> None:
        self.db.execute(statement)
        for table in tables:
            what(table)

    def check(self, group: WholeGroup) -> None:
        for table, shown, mode, wanted in self.sources:
            CHECKS[mode](group, table, shown, wanted)


def read(group: WholeGroup, wanted: dict[str, Any], cells: list[str], rest: str = "") -> list[Row]:
    own = f"src = '{wanted['source_value']}'" if "source_column" in wanted else "true"
    return group.read(f"select {', '.join(cells)} from lake.{wanted['target']} where {own} {rest}")


def check_upsert(group: WholeGroup, table: SourceTable, shown: Shown, wanted: dict[str, Any]) -> None:
    assert Counter(read(group, wanted, shown.names)) == model.present(table, shown), (table.name, wanted)


def check_soft(group: WholeGroup, table: SourceTable, shown: Shown, wanted: dict[str, Any]) -> None:
    found = Counter(read(group, wanted, [*shown.names, "_deleted"]))
    assert found == model.soft(table, shown), (table.name, wanted)
    assert not read(group, wanted, ["id"], "and _deleted <> (_deleted_at is not null)")


def check_history(group: WholeGroup, table: SourceTable, shown: Shown, wanted: dict[str, Any]) -> None:
    cells = [*shown.names, "_valid_from", "_valid_to"]
    rows = read(group, wanted, cells, "and _valid_to is distinct from _valid_from order by _valid_from")
    found: dict[Any, tuple[list[Row], bool]] = {}
    ends: dict[Any, Any] = {}
    for *row, start, end in rows:
        known, _ = found.get(row[0], ([], False))
        assert row[0] not in ends or ends[row[0]] <= start, (table.name, "versions overlap")
        ends[row[0]] = end
        found[row[0]] = ([*known, tuple(row)], end is None)
    assert found == model.versions(table, shown), (table.name, wanted)


def check_log(group: WholeGroup, table: SourceTable, shown: Shown, wanted: dict[str, Any]) -> None:
    rows = read(group, wanted, [*shown.names, "_op", "_unchanged::varchar"], "order by _commit_lsn, _seq")
    copied = Counter(row[:-2] for row in rows if row[-2] == "copy")
    assert copied == Counter(shown.row(row) for row in table.copied), (table.name, wanted)
    found = [row for row in rows if row[-2] != "copy"]
    expected = model.log(table, shown)
    assert [row[-2] for row in found] == [what for what, _ in expected], (table.name, wanted)
    for (*cells, _, unchanged), (what, row) in zip(found, expected, strict=True):
        for name, cell, value in zip(shown.names, cells, row or [None] * len(cells), strict=True):
            if value is MISSING and (cell is not None or f'"{name}"' in str(unchanged)):
                continue  # read from elsewhere, or marked as unknown
            assert cell == value, (table.name, wanted, what, name)


CHECKS = {"upsert": check_upsert, "append": check_log, "history": check_history, "soft_delete": check_soft}


def play(
    db: Database,
    directory: Path,
    seed: int,
    kinds: list[tuple[str, str, str, bool]],
    *,
    batches: int,
    capture: str,
) -> None:
    dice = random.Random(seed)
    db.execute(f"alter database {db.name} set logical_decoding_work_mem = '64kB'")
    world = World(db, kinds, dice)
    world.transaction()
    for table, *_ in world.sources:
        table.note_copy()
    options = {"capture": capture, "poll_interval_ms": 20}
    with whole_group(db, directory, world.tables, group=options, salt_env="TEST_SALT") as group:
        assert not group.refused
        copies = group.copies
        world.check(group)
        for number in range(batches):
            for _ in range(dice.randrange(1, 5)):
                world.transaction()
            group.apply(tasks=dice.random() < 0.5)
            world.check(group)
            if number % 5 == 4:
                group.restart(world.tables)
        differing = {c.table: c for c in group.verify() if c.verdict != "identical"}
        assert not differing, [(world.tables[name.partition(".")[2]], c) for name, c in differing.items()]
        assert group.copies == copies, "nothing was re-copied"
    if capture == "stream" and batches > 2:
        streamed = "select stream_txns from pg_stat_replication_slots where slot_name = 'aqueduck_test'"
        assert db.value(streamed) > 0, "some transactions came before they had ended"


def test_modes_options_and_layouts_together(db: Database, tmp_path: Path) -> None:
    """P-S08, P-S10, P-S11, P-S14, P-S15, P-S16: a mode keeps what it promises under every option, identity and partition."""
    kinds = [
        ("append", "keyed", "hashed", False),
        ("history", "partitioned", "some", False),
        ("soft_delete", "full", "some", True),
        ("upsert", "keyless", "some", False),
    ]
    play(db, tmp_path, 1, kinds, batches=2, capture="stream")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capture", ["stream", "poll"])
@pytest.mark.parametrize("seed", range(2, 6))
def test_the_whole_cross_product(db: Database, tmp_path: Path, seed: int, capture: str) -> None:
    """P-S08, P-S10, P-S11, P-S14, P-S15, P-S16: the same for many combinations, also read by SQL, longer."""
    kinds = random.Random(seed).sample(product(), 16)
    play(db, tmp_path, seed, kinds, batches=8, capture=capture)


@pytest.mark.slow
def test_a_part_of_it_on_every_server(any_db: Database, tmp_path: Path) -> None:
    """P-S08, P-S14: the same with older servers."""
    play(any_db, tmp_path, 9, random.Random(9).sample(product(), 8), batches=6, capture="stream")
