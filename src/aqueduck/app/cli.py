"""
The command line: parses, calls, prints.  What a command does is in the module it calls.

Every error of ours is one line on stderr and an exit code: 2 for configuration, 1 for the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from aqueduck import __version__
from aqueduck.app.events_cli import add_commands
from aqueduck.errors import AqueduckError
from aqueduck.fanout_config import file_is_fanout, load_fanout

__all__ = ["app", "main"]

app = typer.Typer(
    name="aqueduck",
    help="Carry row changes from PostgreSQL into DuckLake, exactly once, on Apache Spark.",
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(width=None if sys.stdout.isatty() else 200)
add_commands(app)

Log = Annotated[
    Literal["console", "json"],
    typer.Option(
        "--log-format", envvar="AQUEDUCK_LOG_FORMAT", help="Log lines for people, or JSON for machines."
    ),
]
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"aqueduck {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long the shop is busy.")] = 20.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server's and the lake's files.")] = False,
) -> None:
    """Watch a small shop flow from an embedded PostgreSQL into a lake."""
    from aqueduck.app.demo import run_demo

    raise typer.Exit(run_demo(seconds=seconds, keep=keep))


@app.command()
def init(config: ConfigFile, as_json: Json = False) -> None:
    """Create publication, slot and lake, or the lakes of a fan-out; changes nothing that is already right."""
    from aqueduck.app.prepare import prepare
    from aqueduck.app.show import print_json
    from aqueduck.config import load_config
    from aqueduck.events_config import load_events

    if (events := load_events(config)) is not None:
        from aqueduck.app.events_run import init_events

        lines = iter([init_events(events)])
    elif file_is_fanout(config):
        from aqueduck.app.fanout_check import init_fanout

        lines = init_fanout(load_fanout(config))
    else:
        lines = prepare(load_config(config))
    if as_json:
        print_json({"prepared": list(lines)})
        return
    for line in lines:
        out.print(line, highlight=False)


@app.command()
def check(config: ConfigFile, as_json: Json = False) -> None:
    """Test every requirement and print the statement that fixes what is missing."""
    from aqueduck.app.check import run_checks
    from aqueduck.app.check_events import run_event_checks
    from aqueduck.app.show import print_json, show_checks
    from aqueduck.config import load_config
    from aqueduck.events_config import load_events

    if (events := load_events(config)) is not None:
        results = run_event_checks(events)
    elif file_is_fanout(config):
        from aqueduck.app.fanout_check import run_fanout_checks

        results = run_fanout_checks(load_fanout(config))
    else:
        results = run_checks(load_config(config))
    if as_json:
        print_json([{"name": r.name, "ok": r.ok, "detail": r.detail, "fix": r.fix} for r in results])
    else:
        show_checks(out, results)
    failed = [r for r in results if not r.ok]
    if failed:
        raise typer.Exit(failed[0].error.exit_code if failed[0].error else 1)


@app.command()
def run(
    config: ConfigFile,
    once: Annotated[
        bool, typer.Option("--once", help="Catch up with what is committed now, then exit.")
    ] = False,
    trust_slot: Annotated[
        bool,
        typer.Option("--trust-slot", help="Nobody touched the slot, although state_dir was lost."),
    ] = False,
    log_format: Log = "console",
) -> None:
    """Run the service until it is stopped; the file's keys say which flow it is."""
    from aqueduck.app.logs import configure_logs
    from aqueduck.events_config import load_events

    configure_logs(log_format)
    if (events := load_events(config)) is not None:
        from aqueduck.app.events_run import run_events

        run_events(events, once=once, trust_slot=trust_slot)
        return
    if file_is_fanout(config):
        from aqueduck.app.fanout_run import run_fanout

        run_fanout(config, once=once)
        return
    from aqueduck.app.service import run_service
    from aqueduck.config import load_config

    run_service(load_config(config), once=once, trust_slot=trust_slot)


@app.command()
def status(config: ConfigFile, as_json: Json = False) -> None:
    """Show every table, every destination, or the place of an events flow: state, position, rows, errors."""
    from aqueduck.events_config import load_events

    if file_is_fanout(config):
        from aqueduck.app.fanout_run import fanout_state
        from aqueduck.app.show import print_json, show_destinations

        rows = fanout_state(config)
        print_json(rows) if as_json else show_destinations(out, rows)
        return
    if (events := load_events(config)) is not None:
        from aqueduck.app.events_status import events_status
        from aqueduck.app.show import print_json, show_events

        found = events_status(events)
        print_json(found) if as_json else show_events(out, found)
        return
    _show(config, "status", as_json)


tables_app = typer.Typer(
    no_args_is_help=True, help="Add, remove, move or copy tables again; the service acts at once."
)
groups_app = typer.Typer(no_args_is_help=True, help="Groups: list, create, drop, enable, disable.")
app.add_typer(tables_app, name="tables")
app.add_typer(groups_app, name="groups")
settings_app = typer.Typer(no_args_is_help=True, help="Settings of all groups, of a group or of a table.")
app.add_typer(settings_app, name="settings")

TableArgument = Annotated[
    str, typer.Argument(help="The source table, such as public.orders.", metavar="TABLE")
]
GroupArgument = Annotated[str, typer.Argument(help="The group's name.", metavar="GROUP")]


@tables_app.command("list")
def tables_list(config: ConfigFile, as_json: Json = False) -> None:
    """Show what is wanted of each table."""
    _show(config, "tables", as_json)


@tables_app.command("add")
def tables_add(
    table: TableArgument,
    config: ConfigFile,
    target: Annotated[
        str | None, typer.Option(help="The lake table; by default main and the same name.")
    ] = None,
    group: Annotated[str, typer.Option(help="The group.")] = "default",
    mode: Annotated[str, typer.Option(help="upsert, append, history or soft_delete.")] = "upsert",
    source_column: Annotated[
        str | None, typer.Option(help="Column that tells the rows of several sources of one target apart.")
    ] = None,
    source_value: Annotated[
        str | None, typer.Option(help="What this source has there; by default its name.")
    ] = None,
    no_copy: Annotated[bool, typer.Option("--no-copy", help="Only changes from now on.")] = False,
    columns: Annotated[
        str | None, typer.Option(help="Only these columns, with commas between.", metavar="A,B")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(help="All columns but these, with commas between.", metavar="A,B")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="Another name in the lake.", metavar="COLUMN=NAME")
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help="hash, redact or constant:VALUE.", metavar="COLUMN=MASK")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Only rows for which this is true.", metavar="CONDITION")
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a table to a group; its rows are copied beside the stream."""
    import json

    from aqueduck.table_options import read_options

    options = json.dumps(read_options(table, columns, exclude, rename or (), mask or (), where, mode))
    said = f"{table} will be {'followed' if no_copy else 'copied and followed'}"
    wanted = {
        "source": table,
        "target": target,
        "group_name": group,
        "mode": mode,
        "copy": not no_copy,
        "source_column": source_column,
        "source_value": source_value,
        "options": options,
    }
    _call(config, as_json, said, "add_table", **wanted)


@tables_app.command("remove")
def tables_remove(
    table: TableArgument,
    config: ConfigFile,
    drop_target: Annotated[bool, typer.Option("--drop-target", help="Drop the lake table as well.")] = False,
    as_json: Json = False,
) -> None:
    """Take a table out of its group; the lake table stays unless told otherwise."""
    said = f"{table} is no longer followed"
    _call(config, as_json, said, "remove_table", source=table, drop_target=drop_target)


@tables_app.command("resync")
def tables_resync(table: TableArgument, config: ConfigFile, as_json: Json = False) -> None:
    """Copy a table again; changes meanwhile are kept."""
    _call(config, as_json, f"{table} will be copied again", "resync_table", source=table)


@tables_app.command("move")
def tables_move(
    table: TableArgument, group: GroupArgument, config: ConfigFile, as_json: Json = False
) -> None:
    """Move a table to another group, which goes on where the old one is."""
    said = f"{table} moves to the group {group}"
    _call(config, as_json, said, "move_table", source=table, group_name=group)


@groups_app.command("list")
def groups_list(config: ConfigFile, as_json: Json = False) -> None:
    """Show the groups: slot, publication, WAL that the slot retains."""
    _show(config, "groups", as_json)


@groups_app.command("create")
def groups_create(group: GroupArgument, config: ConfigFile, as_json: Json = False) -> None:
    """Create a group with its own slot and publication."""
    _call(config, as_json, f"the group {group} is created", "create_group", name=group)


@groups_app.command("drop")
def groups_drop(group: GroupArgument, config: ConfigFile, as_json: Json = False) -> None:
    """Drop a group with its slot and publication; lake tables stay."""
    _call(config, as_json, f"the group {group} is dropped, its lake tables stay", "drop_group", name=group)


@groups_app.command("enable")
def groups_enable(group: GroupArgument, config: ConfigFile, as_json: Json = False) -> None:
    """Run a group again; it catches up from where it was."""
    _call(config, as_json, f"the group {group} runs again", "enable_group", name=group)


@groups_app.command("disable")
def groups_disable(group: GroupArgument, config: ConfigFile, as_json: Json = False) -> None:
    """Stop a group; the server keeps its WAL until it is enabled."""
    _call(config, as_json, f"the group {group} stops; the server keeps its WAL", "disable_group", name=group)


SettingName = Annotated[str, typer.Argument(help="The setting, such as flush_interval_ms.", metavar="NAME")]
ForGroup = Annotated[str | None, typer.Option("--group", help="For this group only.")]
ForTable = Annotated[str | None, typer.Option("--table", help="For this table only.")]


@settings_app.command("list")
def settings_list(config: ConfigFile, as_json: Json = False) -> None:
    """Show all settings with their values for all groups."""
    _show(config, "list_settings", as_json)


@settings_app.command("get")
def settings_get(
    name: SettingName,
    config: ConfigFile,
    group: ForGroup = None,
    table: ForTable = None,
    as_json: Json = False,
) -> None:
    """Print the value that holds, for all groups, a group or a table."""
    _call(config, as_json, "{}", "get_setting", name=name, group_name=group, source=table)


@settings_app.command("set")
def settings_set(
    name: SettingName,
    value: Annotated[str | None, typer.Argument(help="Its value; without, it is taken back.")] = None,
    *,
    config: ConfigFile,
    group: ForGroup = None,
    table: ForTable = None,
    as_json: Json = False,
) -> None:
    """Set a value, for all groups, a group or a table."""
    said = f"{name} is {value}" if value is not None else f"{name} is no longer set here"
    _call(config, as_json, said, "set_setting", name=name, value=value, group_name=group, source=table)


def _show(config: Path, function: str, as_json: bool) -> None:
    from aqueduck.app import show
    from aqueduck.config import load_config
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.registry import rows_of

    with connect(load_config(config).source.dsn) as conn:
        rows = rows_of(conn, function)
    if as_json:
        show.print_json(rows)
        return
    views = {
        "status": show.show_status,
        "groups": show.show_groups,
        "tables": show.show_tables,
        "list_settings": show.show_settings,
    }
    views[function](out, rows)


def _call(config: Path, as_json: bool, said: str, function: str, **arguments: Any) -> None:
    """Call a function of the registry; `said` is for people, with {} for what it returned."""
    from aqueduck.app.show import print_json
    from aqueduck.config import load_config
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.registry import call

    with connect(load_config(config).source.dsn) as conn:
        result = call(conn, function, **arguments)
    if as_json:
        print_json({"called": function, **arguments, "result": result or None})
    else:
        out.print(said.replace("{}", str(result)), highlight=False, markup=False)


@app.command()
def verify(
    config: ConfigFile,
    table: Annotated[list[str] | None, typer.Option(help="Only this table; may be given again.")] = None,
    destination: Annotated[
        list[str] | None, typer.Option(help="Of a fan-out, only this destination; may be given again.")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the lake to catch up.")] = 60.0,
    no_spark: Annotated[bool, typer.Option("--no-spark", help="Read in this process: small tables.")] = False,
    as_json: Json = False,
) -> None:
    """Compare source and lake, by table or destination; exits 1 on a difference, 3 if one was not compared."""
    from aqueduck.app import show

    if file_is_fanout(config):
        _verify_fanout(config, destination or (), as_json)
        return
    from aqueduck.app.verify import verify_tables
    from aqueduck.config import load_config
    from aqueduck.spark.session import build_session

    file = load_config(config)
    spark = None if no_spark else build_session(file.spark.master, file.spark.conf, "aqueduck verify")
    try:
        with show.verify_progress(Console(stderr=True)) as progress:
            results = verify_tables(
                file, spark=spark, tables=table or (), wait_seconds=wait, progress=progress
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


def _verify_fanout(config: Path, only: Sequence[str], as_json: bool) -> None:
    from aqueduck.app import show
    from aqueduck.app.fanout_verify import raise_difference, verify_destinations

    with show.verify_progress(Console(stderr=True)) as progress:
        results = verify_destinations(load_fanout(config), only=only, progress=progress)
    if as_json:
        show.print_json([r.to_dict() for r in results])
    else:
        show.show_destination_verdicts(out, results)
    raise_difference(results)
    if any(r.verdict == "not compared" for r in results):
        raise typer.Exit(show.NOT_COMPARED)


@app.command()
def maintain(config: ConfigFile, as_json: Json = False, log_format: Log = "console") -> None:
    """Merge small files, rewrite those with removed rows, expire lake snapshots, remove what nobody needs."""
    from aqueduck.app.logs import configure_logs
    from aqueduck.app.show import print_json, show_maintenance
    from aqueduck.errors import MaintenanceError

    configure_logs(log_format)
    if file_is_fanout(config):
        from aqueduck.app.maintenance_fanout import maintain_fanout
        from aqueduck.fanout_config import load_fanout

        reports = maintain_fanout(load_fanout(config))
    else:
        from aqueduck.app.maintenance_sync import maintain_sync
        from aqueduck.config import load_config

        reports = [maintain_sync(load_config(config))]
    print_json(reports) if as_json else show_maintenance(out, reports)
    failed = [report for report in reports if report["error"]]
    if failed:
        raise MaintenanceError(f"{failed[0]['lake']}: {failed[0]['error']}")


@app.command()
def asof(
    config: ConfigFile,
    lsn: Annotated[str | None, typer.Option(help="A position of the source, such as 0/1A2B3C4.")] = None,
    time: Annotated[
        str | None,
        typer.Option(help="A time of the source, such as 2026-05-01T12:00:00Z; UTC if it says none."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="The group, if the file has several.")] = None,
    as_json: Json = False,
) -> None:
    """Print the lake snapshot that shows the source as of a position or a time."""
    from aqueduck.app.asof import find_snapshot
    from aqueduck.app.show import print_json, show_snapshot
    from aqueduck.config import load_config

    file = load_config(config)
    state = find_snapshot(file, lsn=lsn, time=time, group=group)
    print_json(state.to_dict()) if as_json else show_snapshot(out, state)


@app.command()
def bench(
    name: Annotated[
        str, typer.Argument(help="drain, mixed, big, copy, freshness, events, fanout or tenants.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    rows: Annotated[int | None, typer.Option(help="Fewer or more rows than the standard run.")] = None,
    capture: Annotated[
        str | None, typer.Option(help="stream, poll or auto, for drain, mixed, big and events.")
    ] = None,
) -> None:
    """Measure against PostgreSQL's own limit in the same run."""
    from aqueduck.app.bench import run_bench

    run_bench(name, as_json=as_json, rows=rows, capture=capture)


def main() -> None:
    """The console script."""
    try:
        app()
    except AqueduckError as exc:
        print(f"aqueduck: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
