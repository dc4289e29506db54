"""
The demo: a small shop in an embedded PostgreSQL, replicated live into a lake, and compared at the end.

Everything is in one temporary directory (or one to keep), which is removed when the demo ends, also on
ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import structlog
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from aqueduck.config.sync import SyncConfig, parse_config
from aqueduck.lab.lab_server import lab_server, private_file
from aqueduck.lab.shop import ShopLoad, create_shop
from aqueduck.lab.waiting import wait_until_seen, wait_until_streaming
from aqueduck.model.errors import ServerStartError
from aqueduck.postgres.session.server import flushed_position
from aqueduck.sync.actions import RegistryActions
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.service import SyncService
from aqueduck.sync.verify import TableComparison, verify_tables
from aqueduck.web.server import serve

__all__ = ["run_demo"]

CONFIG = """\
source:
  dsn: "{dsn}"
lake:
  catalog: sqlite:lake.sqlite
  data_path: lake_data
groups:
  - name: shop
    flush_interval_ms: 500
    tables:
      - source: public.customers
      - source: public.orders
      - source: public.order_items
"""

QUESTION = """\
select c.country, count(*) as orders, sum(o.total) as revenue
from lake.main.orders o join lake.main.customers c on c.id = o.customer_id
where o.status = 'shipped' group by all order by revenue desc limit 5"""


def run_demo(*, seconds: float, keep: bool) -> int:
    """Run the demo; returns 0 if source and lake are identical at the end."""
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _directory(keep) as directory:
            return _demo(console, directory, seconds, keep)
    except KeyboardInterrupt:
        console.print("\nstopped; everything the demo started is stopped")
        return 130


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="aqueduck-demo-"))
    directory.chmod(0o711)  # the server may run as another user, who must be able to enter
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _demo(console: Console, directory: Path, seconds: float, keep: bool) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    console.print("[bold]1/4[/] starting PostgreSQL with a small shop …")
    with lab_server(directory) as server:
        create_shop(server.dsn)
        config_file = directory / "aqueduck.yaml"
        private_file(config_file, CONFIG.format(dsn=server.dsn))
        config = parse_config(config_file.read_text(), base_dir=directory, env={})
        console.print("[bold]2/4[/] starting Spark and the streaming query …")
        service = SyncService(config)
        load = ShopLoad(server.dsn)
        page = contextlib.ExitStack()
        try:
            service.prepare()
            _show_page(console, page, service)
            service.start()
            with console.status("copying the rows that are already there …"):
                wait_until_streaming(service, "shop", seconds=120)
            load.start()
            console.print(
                f"[bold]3/4[/] the shop is busy for {seconds:.0f} s; every line is a table of the lake\n"
            )
            _watch(console, service, load, seconds)
            load.stop()
            if load.failure is not None:
                raise load.failure
            _catch_up(console, service, server.dsn)
            console.print("[bold]4/4[/] comparing source and lake, row by row …")
            results = verify_tables(config, session=service.lake)
            _show_comparison(console, results)
            _show_answer(console, service)
        finally:
            load.stop()
            page.close()
            service.stop()
    same = all(r.same for r in results)
    _say_next(console, directory, config, keep)
    return 0 if same else 1


def _show_page(console: Console, stack: contextlib.ExitStack, service: SyncService) -> None:
    """Serve the demo's page; if the port is taken, use a free one."""
    wanted = service.config.server
    overviews, actions = SyncOverviews(service), RegistryActions(service.config.source.dsn)
    try:
        address = stack.enter_context(serve(wanted, overviews, actions))
    except ServerStartError as exc:
        console.print(f"[yellow]{exc.message}; taking a free port[/]", highlight=False)
        free = wanted.model_copy(update={"port": 0})
        address = stack.enter_context(serve(free, overviews, actions))
    console.print(f"    live in your browser while the demo runs: [bold cyan]{address}[/]", highlight=False)


def _watch(console: Console, service: SyncService, load: ShopLoad, seconds: float) -> None:
    began = time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while (elapsed := time.monotonic() - began) < seconds:
            live.update(_view(service, load, elapsed, seconds))
            service.check()
            time.sleep(0.25)
        live.update(_view(service, load, seconds, seconds))


def _view(service: SyncService, load: ShopLoad, elapsed: float, seconds: float) -> Group:
    status = service.status("shop")
    table = Table(expand=False)
    for name in ("lake table", "changes applied", "inserted", "updated", "deleted"):
        table.add_column(name, justify="left" if name == "lake table" else "right")
    for oid, synced in service.runner("shop").tables.items():
        counts = status.tables.get(oid)
        if counts is not None:
            table.add_row(
                str(synced.target),
                *(f"{n:,}" for n in (counts.changes, counts.inserts, counts.updates, counts.deletes)),
            )
    freshness = "–" if status.freshness_seconds is None else f"{status.freshness_seconds:.2f} s"
    done = int(30 * min(1.0, elapsed / seconds))
    bar = "█" * done + "░" * (30 - done)
    line = (
        f"[cyan]{bar}[/] {elapsed:4.0f} s   shop: [bold]{load.transactions:,}[/] transactions"
        f"   lake: [bold]{status.batches:,}[/] commits   behind: [bold]{status.lag_bytes / 1024:,.0f} KiB[/]"
        f"   freshness: [bold]{freshness}[/]"
    )
    return Group(table, line)


def _catch_up(console: Console, service: SyncService, dsn: str) -> None:
    target = flushed_position(dsn)
    began = time.monotonic()
    with console.status("the shop is closed; waiting until the lake has everything …"):
        wait_until_seen(service, "shop", target, seconds=120)
    console.print(f"\nthe lake has everything, {time.monotonic() - began:.1f} s after the last transaction")


def _show_comparison(console: Console, results: list[TableComparison]) -> None:
    table = Table("table", "source rows", "lake rows", "content")
    for r in results:
        verdict = "[green]identical[/]" if r.same else "[red]DIFFERENT[/]"
        table.add_row(r.table, f"{r.source_rows:,}", f"{r.lake_rows:,}", verdict)
    console.print(table)
    if all(r.same for r in results):
        console.print("[bold green]source and lake are identical[/]")
    else:
        console.print("[bold red]source and lake differ[/]")


def _show_answer(console: Console, service: SyncService) -> None:
    rows, names = service.query_lake(QUESTION)
    answer = Table(*names)
    for row in rows:
        answer.add_row(*map(str, row))
    console.print(
        Panel(QUESTION, title="a question to the lake, in DuckDB", title_align="left", expand=False)
    )
    console.print(answer)


def _say_next(console: Console, directory: Path, config: SyncConfig, keep: bool) -> None:
    console.print("\nWhat to do next:")
    console.print("  • your own database: write a file like the one in the README, then")
    console.print(
        "      [bold]aqueduck check -c aqueduck.yaml[/]  and  [bold]aqueduck run -c aqueduck.yaml[/]"
    )
    console.print("  • how fast it is here: [bold]aqueduck bench drain[/]")
    if keep:
        console.print(
            f"  • the lake stays in {directory}: attach 'ducklake:{config.lake.catalog}' in DuckDB",
            highlight=False,
        )
