"""
A source table and what each mode should make of it, as plain Python that knows nothing of streams, folds and lakes.

`SourceTable` runs statements about single rows on a real server and remembers what they did, transaction by transaction, with
savepoints.  `expected` functions say what the lake should show; `Shown` is how options change a row.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.fix_postgres import Database

COLUMNS = ("id", "n", "v", "doc", "note", "secret")
SALT = "salt"
LARGE = 3000
MISSING = object()
"""A cell that PostgreSQL may not have sent."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Shown:
    """How options change rows: `cells` are the source's columns in the lake's order."""

    options: dict[str, Any]

    @property
    def names(self) -> list[str]:
        kept = [c for c in COLUMNS if c not in self.options.get("exclude", ())]
        return [self.options.get("rename", {}).get(c, c) for c in kept]

    def row(self, row: Row) -> Row:
        masks = self.options.get("mask", {})
        cells = []
        for name, value in zip(COLUMNS, row, strict=True):
            if name in self.options.get("exclude", ()):
                continue
            mask = masks.get(name)
            if mask == "redact":
                value = None
            elif mask == "hash" and value is not None and value is not MISSING:
                value = hashlib.sha256(f"{SALT}{value}".encode()).hexdigest()
            cells.append(value)
        return tuple(cells)

    def passes(self, row: Row) -> bool:
        return "where" not in self.options or (row[1] is not None and row[1] % 3 != 0)


@dataclass(frozen=True)
class Event:
    """One change: the row that it left, or for a delete the row that was there."""

    what: str
    row: Row | None = None
    unsent: bool = False
    """Whether the large value was not part of it."""


@dataclass
class Open:
    """What a transaction has done so far."""

    rows: list[Row]
    events: list[Event] = field(default_factory=list)


class SourceTable:
    """One table; rows without a key are a multiset."""

    def __init__(self, db: Database, name: str, layout: str, identity: str) -> None:
        self.db, self.name, self.keyless = db, name, layout == "keyless"
        self.full = self.keyless or identity == "full"
        key = "" if self.keyless else ", primary key (id)"
        partition = " partition by hash (id)" if layout == "partitioned" else ""
        db.execute(
            f"create table {name} (id int, n int, v text, doc text, note text, secret text{key}){partition}"
        )
        for remainder in range(2) if partition else ():
            db.execute(
                f"create table {name}_{remainder} partition of {name} for values with (modulus 2, remainder {remainder})"
            )
        for leaf in [f"{name}_0", f"{name}_1", name] if partition else [name]:
            db.execute(f"alter table {leaf} alter doc set storage external")
            if self.full:
                db.execute(f"alter table {leaf} replica identity full")
        self.rows: list[Row] = []
        self.copied: list[Row] = []
        self.log: list[Event] = []
        self.versions: dict[Any, list[Row]] = {}
        self.open_versions: set[Any] = set()
        self.soft: dict[Any, tuple[Row, bool]] = {}
        self.now: Open | None = None
        self._saved: list[Open] = []

    # -- transactions

    def begin(self) -> None:
        self.now = Open(list(self.rows))
        self._saved = []

    def savepoint(self) -> None:
        self._saved.append(copy.deepcopy(self.now))  # type: ignore[arg-type]

    def rollback_to(self) -> None:
        self.now = self._saved.pop()

    def release(self) -> None:
        self._saved.pop()

    def end(self, commit: bool) -> None:
        now, self.now = self.now, None
        assert now is not None
        if not commit:
            return
        touched: dict[Any, bool] = {}
        for event in now.events:
            if event.row is None:  # a truncate
                touched |= dict.fromkeys(self.open_versions | touched.keys(), False)
                self.soft = {key: (last, True) for key, (last, _) in self.soft.items()}
            else:
                touched[event.row[0]] = event.what != "delete"
                self.soft[event.row[0]] = (event.row, event.what == "delete")
        alive = {row[0]: row for row in now.rows}
        for key, written in touched.items():
            self.open_versions.discard(key)
            if written:
                self.versions.setdefault(key, []).append(alive[key])
                self.open_versions.add(key)
        self.rows = now.rows
        self.log += now.events

    def note_copy(self) -> None:
        """The copy has the rows of now."""
        self.copied = list(self.rows)
        self.log = []
        self.versions = {row[0]: [row] for row in self.rows}
        self.open_versions = {row[0] for row in self.rows}
        self.soft = {row[0]: (row, False) for row in self.rows}

    # -- statements

    def step(self, dice: random.Random) -> None:
        now = self.now
        assert now is not None
        what = dice.choices(
            ["insert", "update", "touch", "move", "delete", "truncate"], [6, 4, 4, 2, 3, 0.15]
        )[0]
        if what == "insert":
            self.insert(dice, dice.randrange(12))
        elif what == "truncate":
            self.db.execute(f"truncate {self.name}")
            now.rows = []
            now.events.append(Event("truncate"))
        elif now.rows:
            old = dice.choice(now.rows)
            if what == "delete":
                self._do(f"delete from {self.name}", (), old)
                now.rows.remove(old)
                now.events.append(Event("delete", old))
            elif what == "update":
                self._update(
                    old, (old[0], dice.randrange(9), dice.choice("abc"), *old[3:]), "n = %s, v = %s", (1, 2)
                )
            elif what == "touch":
                self._update(old, (*old[:3], self._doc(dice), *old[4:]), "doc = %s", (3,))
            else:
                key = dice.randrange(12)
                if self.keyless or all(row[0] != key for row in now.rows):
                    self._update(old, (key, *old[1:]), "id = %s", (0,))

    def insert(self, dice: random.Random, key: int, doc: str | None = None) -> None:
        now = self.now
        assert now is not None
        if not self.keyless and any(row[0] == key for row in now.rows):
            return
        doc = doc or self._doc(dice)
        row = (
            key,
            dice.choice([None, 1, 2, 3]),
            dice.choice(["a", "b", None]),
            doc,
            "note",
            "secret",
        )
        self.db.execute(f"insert into {self.name} values (%s, %s, %s, %s, %s, %s)", row)
        now.rows.append(row)
        now.events.append(Event("insert", row))

    def _doc(self, dice: random.Random) -> str | None:
        return dice.choice([None, "short", f"{dice.randrange(5)}" * LARGE])

    def _do(self, statement: str, values: tuple[Any, ...], old: Row) -> None:
        """To one row that is like `old`, of several that may be."""
        same = " and ".join(f"{name} is not distinct from %s" for name in COLUMNS)
        self.db.execute(
            f"{statement} where (tableoid, ctid) = (select tableoid, ctid from {self.name} where {same} limit 1)",
            (*values, *old),
        )

    def _update(self, old: Row, new: Row, assignment: str, cells: tuple[int, ...]) -> None:
        now = self.now
        assert now is not None
        self._do(f"update {self.name} set {assignment}", tuple(new[c] for c in cells), old)
        now.rows.remove(old)
        now.rows.append(new)
        unsent = not self.full and 3 not in cells and isinstance(old[3], str) and len(old[3]) >= LARGE
        if self.keyless or old[0] != new[0]:
            now.events += [Event("delete", old), Event("insert", new, unsent)]
        else:
            now.events.append(Event("update", new, unsent))


# -- what the lake should show


def present(table: SourceTable, shown: Shown) -> Counter[Row]:
    return Counter(shown.row(row) for row in table.rows if shown.passes(row))


def soft(table: SourceTable, shown: Shown) -> Counter[Row]:
    return Counter((*shown.row(row), gone) for row, gone in table.soft.values())


def versions(table: SourceTable, shown: Shown) -> dict[Any, tuple[list[Row], bool]]:
    """By key: its versions in order, and whether the last one is the present one."""
    key = COLUMNS.index("id")
    return {
        shown.row(rows[0])[key]: ([shown.row(row) for row in rows], source in table.open_versions)
        for source, rows in table.versions.items()
    }


def log(table: SourceTable, shown: Shown) -> list[tuple[str, Row | None]]:
    def as_logged(event: Event) -> Row | None:
        row = event.row
        if row is None:
            return None
        if event.what == "delete" and not table.full:  # its key
            row = (row[0], *[None] * (len(row) - 1))
        return shown.row((*row[:3], MISSING, *row[4:]) if event.unsent else row)

    return [(event.what, as_logged(event)) for event in table.log]
