"""
The command line: parses arguments, calls the code that does the work, prints the result.

Families of commands have their own modules: `setup_commands` (new, init, check, uninstall),
`registry_commands` (tables, groups, settings) and `events_commands` (tail, slots). Every error is one line on
stderr and an exit code: 2 for configuration, 1 for everything else. `--json` changes only stdout.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from aqueduck import __version__
from aqueduck.cli.events_commands import add_events_commands
from aqueduck.cli.help_texts import add_examples
from aqueduck.cli.options import CONFIG, Adopt, ConfigFile, Json, Log, out
from aqueduck.cli.registry_commands import add_registry_commands, read_status
from aqueduck.cli.setup_commands import add_setup_commands
from aqueduck.config.fanout import file_is_fanout, load_fanout
from aqueduck.model.errors import ConfigError, own_error
from aqueduck.state_files.private_files import restrict_new_files

__all__ = ["app", "main"]

DemoFlow = Literal["sync", "fanout", "events"]

app = typer.Typer(
    name="aqueduck",
    help="Carry row changes from PostgreSQL into DuckLake, exactly once, on Apache Spark.",
    invoke_without_command=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

OPERATE, TRY = "Run and watch", "Try and measure"
"""Parts of the list of commands."""


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    from aqueduck.cli.logs import configure_logs

    configure_logs()
    restrict_new_files(os.environ)
    if version:
        out.print(f"aqueduck {__version__}", highlight=False)
        raise typer.Exit


add_setup_commands(app)


@app.command(rich_help_panel=OPERATE)
def run(
    config: ConfigFile = CONFIG,
    once: Annotated[
        bool, typer.Option("--once", help="Process everything committed so far, then exit.")
    ] = False,
    trust_slot: Annotated[
        bool,
        typer.Option(
            "--trust-slot",
            help="Trust the slot although state_dir was lost; use it only if nothing else moved the slot.",
        ),
    ] = False,
    adopt: Adopt = False,
    log_format: Log = "console",
) -> None:
    """Run the service until it is stopped; the keys of the file determine the flow."""
    from aqueduck.cli.logs import configure_logs
    from aqueduck.config.events import load_events

    configure_logs(log_format)
    if (events := load_events(config)) is not None:
        from aqueduck.events.run import run_events

        run_events(events, once=once, trust_slot=trust_slot)
        return
    if file_is_fanout(config):
        from aqueduck.fanout.run import run_fanout

        run_fanout(config, once=once)
        return
    from aqueduck.config.sync import load_config
    from aqueduck.sync.service import run_service

    run_service(load_config(config), once=once, trust_slot=trust_slot, adopt=adopt)


@app.command(rich_help_panel=OPERATE)
def status(
    config: ConfigFile = CONFIG,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Show every table, every destination, or the position of an events flow: state, position, rows, errors."""
    from aqueduck.cli.show import print_json
    from aqueduck.cli.watching import keep_showing

    read, show = _status_of(config)
    shown = print_json if as_json else functools.partial(show, out)
    if watch:
        keep_showing(out, read, shown, interval)
    shown(read())


def _status_of(config: Path) -> tuple[Callable[[], Any], Callable[[Console, Any], None]]:
    """How the state of a file's flow is read, and shown."""
    from aqueduck.cli import show
    from aqueduck.config.events import load_events

    if file_is_fanout(config):
        from aqueduck.fanout.run import fanout_state

        return functools.partial(fanout_state, config), show.show_destinations
    if (events := load_events(config)) is not None:
        from aqueduck.events.status import events_status

        return functools.partial(events_status, events), show.show_events
    return functools.partial(read_status, config), show.show_status


@app.command(rich_help_panel=OPERATE)
def verify(
    config: ConfigFile = CONFIG,
    table: Annotated[list[str] | None, typer.Option(help="Only this table; repeatable.")] = None,
    destination: Annotated[
        list[str] | None, typer.Option(help="Only this destination of a fan-out; repeatable.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the lake to catch up.")] = 60.0,
    no_spark: Annotated[
        bool, typer.Option("--no-spark", help="Compare in this process, without Spark; for small tables.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare every row, and find rows that belong to no destination.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare source and lake by table or destination; exits with 1 on a difference, 3 if one was not compared."""
    from aqueduck.cli import show

    if file_is_fanout(config):
        if table:
            raise ConfigError(
                "--table is for files with groups; this file is a fan-out", hint="use --destination"
            )
        _verify_fanout(config, destination or (), as_json, deep=deep)
        return
    if destination:
        raise ConfigError("--destination is only for the file of a fan-out", hint="use --table")
    from aqueduck.config.sync import load_config
    from aqueduck.spark.session.session import build_session
    from aqueduck.sync.verify import verify_tables

    file = load_config(config)
    spark = (
        None
        if no_spark
        else build_session(file.spark.master, file.spark.conf, "aqueduck verify", state_dir=file.state_dir)
    )
    try:
        with show.verify_progress(Console(stderr=True)) as progress:
            results = verify_tables(
                file, spark=spark, tables=table or (), wait_seconds=wait, deep=deep, progress=progress
            )
    finally:
        if spark is not None:
            spark.stop()
    if as_json:
        show.print_json([r.to_dict() for r in results])
    else:
        show.show_verdicts(out, results)
    show.raise_verdict(results)
    if any(r.verdict == "not compared" for r in results):
        raise typer.Exit(show.NOT_COMPARED)


def _verify_fanout(config: Path, only: Sequence[str], as_json: bool, *, deep: bool) -> None:
    from aqueduck.cli import show
    from aqueduck.fanout.verdicts import raise_difference
    from aqueduck.fanout.verify import verify_destinations

    with show.verify_progress(Console(stderr=True)) as progress:
        results = verify_destinations(load_fanout(config), only=only, deep=deep, progress=progress)
    if as_json:
        show.print_json([r.to_dict() for r in results])
    else:
        show.show_destination_verdicts(out, results)
    raise_difference(results)
    if any(r.verdict == "not compared" for r in results):
        raise typer.Exit(show.NOT_COMPARED)


@app.command(rich_help_panel=OPERATE)
def maintain(
    config: ConfigFile = CONFIG,
    relayout: Annotated[
        bool,
        typer.Option(
            "--relayout",
            help="Also rewrite files from before a change of their table's partition keys or sort keys.",
        ),
    ] = False,
    as_json: Json = False,
    log_format: Log = "console",
) -> None:
    """Merge small files, rewrite files with deleted rows, expire lake snapshots, remove unused files."""
    from aqueduck.cli.logs import configure_logs
    from aqueduck.cli.show import print_json, show_maintenance
    from aqueduck.model.errors import MaintenanceError

    configure_logs(log_format)
    if file_is_fanout(config):
        from aqueduck.fanout.maintain import maintain_fanout

        if relayout:
            raise ConfigError("--relayout is for the lake of a sync", hint="re-seed a destination instead")
        reports = maintain_fanout(load_fanout(config))
    else:
        from aqueduck.config.sync import load_config
        from aqueduck.sync.maintain import maintain_sync

        reports = [maintain_sync(load_config(config), relayout=relayout)]
    print_json(reports) if as_json else show_maintenance(out, reports)
    failed = [report for report in reports if report["error"]]
    if failed:
        raise MaintenanceError(f"{failed[0]['lake']}: {failed[0]['error']}")


@app.command(rich_help_panel=OPERATE)
def asof(
    config: ConfigFile = CONFIG,
    lsn: Annotated[str | None, typer.Option(help="A position of the source, such as 0/1A2B3C4.")] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="A commit time of the source, such as 2026-05-01T12:00:00Z; UTC if it has no time zone."
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(help="The group, if the file has several.")] = None,
    as_json: Json = False,
) -> None:
    """Print the lake snapshot that shows the source as of a position or a time."""
    from aqueduck.cli.show import print_json, show_snapshot
    from aqueduck.config.sync import load_config
    from aqueduck.sync.asof import find_snapshot

    file = load_config(config)
    state = find_snapshot(file, lsn=lsn, time=time, group=group)
    print_json(state.to_dict()) if as_json else show_snapshot(out, state)


@app.command(rich_help_panel=TRY)
def demo(
    flow: Annotated[DemoFlow, typer.Option(help="The flow to show.")] = "sync",
    seconds: Annotated[float, typer.Option(min=1, help="How long the source is changed.")] = 25.0,
    kill: Annotated[bool, typer.Option(help="Kill the service with -9 in the middle.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server's and the lake's files.")] = False,
) -> None:
    """Watch changes flow live through a service that is killed with -9 and resumes; then compare both sides."""
    from aqueduck.lab.demo import run_demo

    raise typer.Exit(run_demo(flow, seconds=seconds, kill=kill, keep=keep))


@app.command(rich_help_panel=TRY)
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="drain, mixed, big, small, varied, copy, freshness, tables, events, fanout or tenants."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of rows, instead of the standard number.")
    ] = None,
    capture: Annotated[
        str | None,
        typer.Option(help="stream, poll or auto, for drain, mixed, big, small, varied and events."),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(min=2, max=10_000, help="Number of partitions of the lake table, for drain and copy."),
    ] = None,
    tables: Annotated[int | None, typer.Option(min=1, help="Number of tables, for tables.")] = None,
    catalog: Annotated[str | None, typer.Option(help="postgres or sqlite, for tables.")] = None,
    one_transaction: Annotated[
        bool, typer.Option("--one-transaction", help="For tables: change all tables in one transaction.")
    ] = False,
) -> None:
    """Measure throughput against PostgreSQL's own limit in the same run."""
    from aqueduck.lab.bench import run_bench

    given: dict[str, Any] = {
        "capture": capture,
        "partitions": partitions,
        "tables": tables,
        "catalog": catalog,
        "one_transaction": one_transaction or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    run_bench(name, as_json=as_json, rows=rows, **options)


add_registry_commands(app)
add_events_commands(app)
add_examples(app)


def _flush() -> None:
    """Report a write error on stdout here, before the interpreter reports it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def main() -> None:
    """The console script."""
    try:
        try:
            app()
        finally:
            _flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as exc:  # noqa: BLE001 - people see one line for any error, without values
        error = own_error(exc)
        print(f"aqueduck: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
