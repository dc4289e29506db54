"""The demo of `fanout`: one lake with the rows of all tenants, split live into a lake for each of them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import RenderableType

from aqueduck.config.fanout import parse_fanout
from aqueduck.config.lake_place import LakePlace
from aqueduck.fanout.verify import verify_destinations
from aqueduck.lab.demo.lake_reader import PlainReader
from aqueduck.lab.demo.play import Flow, Load
from aqueduck.lab.demo.screen import Count, Screen, grid
from aqueduck.lab.lab_server import private_file
from aqueduck.lake.session.pool import LakePool
from aqueduck.model.errors import LakeBusyError

__all__ = ["FanoutDemo"]

TENANTS = ("mallard", "pintail", "teal")
NEWCOMER = "wigeon"
CONFIG = """\
source:
  catalog: sqlite:shared.sqlite
  data_path: shared_data
  table: events
routing:
  field: company
  key_columns: [id]
destinations: []
dynamic:
  catalog: "sqlite:{{value}}.sqlite"
  data_path: "{{value}}_data"
poll:
  interval_seconds: 0.5
server:
  port: {port}
"""


class FanoutDemo:
    """The demo while it runs."""

    source = "a lake with the rows of three tenants"
    names = ("shared lake", "tenants' lakes")
    advice: tuple[str, ...] = (
        "your own lake: write a file as in docs/fanout.md, then",
        "  [bold]aqueduck check -c fanout.yaml[/] and [bold]aqueduck run -c fanout.yaml[/]",
    )

    def prepare(self, directory: Path, port: int, stack: contextlib.ExitStack) -> Path:
        file = directory / "fanout.yaml"
        private_file(file, CONFIG.format(port=port))
        self._config = parse_fanout(file.read_text(), base_dir=directory, env={})
        place = LakePlace(catalog=f"sqlite:{directory}/shared.sqlite", data_path=f"{directory}/shared_data/")
        self._load = TenantLoad(place)
        self._load.create()
        self._source = PlainReader(directory / "shared.sqlite")
        self._lakes = {name: PlainReader(directory / f"{name}.sqlite") for name in (*TENANTS, NEWCOMER)}
        for reader in (self._source, *self._lakes.values()):
            stack.callback(reader.close)
        return file

    def load(self) -> Load:
        return self._load

    def runs(self, flow: Flow) -> bool:
        live = [d for d in flow["destinations"] if d["state"] == "live"]
        return len(live) == len(self._load.tenants) and all(d["lag_snapshots"] <= 10 for d in live)

    def act(self) -> str:
        self._load.tenants = (*TENANTS, NEWCOMER)
        return f"[bold]a new tenant, {NEWCOMER}[/]: its lake appears with its first row"

    def view(self, flow: Flow | None) -> RenderableType:
        states = {d["name"]: d["state"] for d in flow["destinations"]} if flow else {}
        rows: dict[str, int] = dict(
            self._source.rows("select company, count(*) from lake.main.events group by all")
        )
        return grid(
            ("tenant", "rows in the shared lake", "rows in its own lake", "state"),
            (
                (
                    name,
                    rows.get(name),
                    self._tenant_rows(name),
                    states.get(name, "–" if flow else "no service"),
                )
                for name in self._load.tenants
            ),
        )

    def line(self, flow: Flow | None) -> str:
        behind = max((d["lag_snapshots"] for d in flow["destinations"]), default=0) if flow else "?"
        return (
            f"{self._load.transactions:,} transactions  {self._load.moves:,} moves  {behind} snapshots behind"
        )

    def last_change(self) -> Callable[[Flow], bool]:
        last = self._load.snapshot()
        return lambda flow: all((d["position"] or 0) >= last for d in flow["destinations"])

    def look_back(self, screen: Screen, ended: float) -> None:
        """A tenant sees its own lake only; there is nothing to add."""

    def counts(self) -> Iterator[Count]:
        """Compare the keys of both sides, beside the verdict of `aqueduck verify --deep` on all values."""
        verdicts = {r.destination: r.verdict for r in verify_destinations(self._config, env={}, deep=True)}
        _, rows = self._source.ask("select company, id from lake.main.events")
        for name in self._load.tenants:
            source = {key for company, key in rows if company == name}
            own = Counter(key for (key,) in self._lakes[name].ask("select id from lake.main.events")[1])
            yield Count(
                name,
                source=len(source),
                copy=own.total(),
                lost=len(source - own.keys()),
                duplicated=own.total() - len(own),
                identical=verdicts.get(name) == "identical" and source == own.keys(),
            )

    def _tenant_rows(self, name: str) -> int | None:
        rows = self._lakes[name].rows("select count(*) from lake.main.events")
        return rows[0][0] if rows else None


class TenantLoad:
    """A thread that changes the shared lake: inserts, updates, deletes, and rows that move to another tenant."""

    def __init__(self, place: LakePlace) -> None:
        self._place = place
        self._pool = LakePool()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenant-load", daemon=True)
        self._random = random.Random(7)
        self._rows = 0
        self.tenants: tuple[str, ...] = TENANTS
        self.transactions = 0
        self.moves = 0
        self.failure: BaseException | None = None

    def create(self) -> None:
        self._change("create table {t} (id bigint, company varchar, amount decimal(12, 2), note varchar)")
        self._insert(3_000)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def snapshot(self) -> int:
        """The newest lake snapshot."""
        with self._pool.use(self._place) as lake:
            return int(lake.execute(f"select max(snapshot_id) from ducklake_snapshots('{lake.alias}')")[0][0])

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.25):
                self._step()
        except BaseException as exc:  # noqa: BLE001 - the demo raises it
            self.failure = exc

    def _step(self) -> None:
        pick = self._random.random()
        first = self._random.randrange(self._rows)
        if pick < 0.5:
            self._insert(40)
        elif pick < 0.7:
            self._change(f"update {{t}} set amount = amount + 1 where id between {first} and {first + 9}")
        elif pick < 0.9:
            new = self._random.choice(self.tenants)
            self._change(f"update {{t}} set company = '{new}' where id between {first} and {first + 4}")
            self.moves += 1
        else:
            self._change(f"delete from {{t}} where id between {first} and {first + 2}")

    def _insert(self, rows: int) -> None:
        names = ", ".join(f"'{name}'" for name in self.tenants)
        self._change(
            f"insert into {{t}} select i, [{names}][1 + i % {len(self.tenants)}], i * 0.25, 'note ' || i"
            f" from range({self._rows}, {self._rows + rows}) r(i)"
        )
        self._rows += rows

    def _change(self, statement: str) -> None:
        """One transaction; a lake that another process is committing to at the same moment is tried again."""
        while not self._stop.is_set():
            with contextlib.suppress(LakeBusyError), self._pool.use(self._place) as lake:
                lake.execute(
                    statement.format(t=f"{lake.alias}.main.events"), doing="changing the shared lake"
                )
                self.transactions += 1
                return
