"""
The command line: parses, calls, prints.  What a command does is in the module it calls.

Every error of ours is one line on stderr and an exit code: 2 for configuration, 1 for the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aqueduck.errors import AqueduckError

__all__ = ["app", "main"]

app = typer.Typer(
    name="aqueduck",
    help="Carry row changes from PostgreSQL into DuckLake, exactly once, on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long the shop is busy.")] = 20.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the server's and the lake's files.")] = False,
) -> None:
    """Watch a small shop flow from an embedded PostgreSQL into a lake."""
    from aqueduck.app.demo import run_demo

    raise typer.Exit(run_demo(seconds=seconds, keep=keep))


@app.command()
def init(config: ConfigFile) -> None:
    """Create publication, slot and lake; changes nothing that is already right."""
    from aqueduck.app.prepare import prepare
    from aqueduck.config import load_config

    for line in prepare(load_config(config)):
        out.print(line, highlight=False)


@app.command()
def check(config: ConfigFile, as_json: Json = False) -> None:
    """Test every requirement and print the statement that fixes what is missing."""
    from aqueduck.app.check import run_checks
    from aqueduck.config import load_config

    results = run_checks(load_config(config))
    failed = [r for r in results if not r.ok]
    if as_json:
        print(json.dumps([{"name": r.name, "ok": r.ok, "detail": r.detail, "fix": r.fix} for r in results]))
    else:
        for r in results:
            out.print(f"[{'green' if r.ok else 'red'}]{'ok  ' if r.ok else 'FAIL'}[/] {r.name}: ", end="")
            out.print(r.detail, highlight=False, markup=False)
            if r.fix:
                out.print(f"       fix: {r.fix}", highlight=False, markup=False)
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
) -> None:
    """Run the service until it is stopped."""
    from aqueduck.app.service import run_service
    from aqueduck.config import load_config

    run_service(load_config(config), once=once, trust_slot=trust_slot)


@app.command()
def status(config: ConfigFile, as_json: Json = False) -> None:
    """Show every table: state, position, rows, errors."""
    _show(_registry_rows(config, "status"), as_json, STATUS_COLUMNS)


tables_app = typer.Typer(
    no_args_is_help=True, help="Add, remove, move or copy tables again; the service acts at once."
)
groups_app = typer.Typer(no_args_is_help=True, help="Groups: list, create, drop, enable, disable.")
app.add_typer(tables_app, name="tables")
app.add_typer(groups_app, name="groups")

TableArgument = Annotated[
    str, typer.Argument(help="The source table, such as public.orders.", metavar="TABLE")
]
GroupArgument = Annotated[str, typer.Argument(help="The group's name.", metavar="GROUP")]


@tables_app.command("add")
def tables_add(
    table: TableArgument,
    config: ConfigFile,
    target: Annotated[
        str | None, typer.Option(help="The lake table; by default main and the same name.")
    ] = None,
    group: Annotated[str, typer.Option(help="The group.")] = "default",
    no_copy: Annotated[bool, typer.Option("--no-copy", help="Only changes from now on.")] = False,
) -> None:
    """Add a table to a group; its rows are copied beside the stream."""
    _call(config, "add_table", source=table, target=target, group_name=group, copy=not no_copy)
    out.print(f"{table} will be copied and followed", highlight=False)


@tables_app.command("remove")
def tables_remove(
    table: TableArgument,
    config: ConfigFile,
    drop_target: Annotated[bool, typer.Option("--drop-target", help="Drop the lake table as well.")] = False,
) -> None:
    """Take a table out of its group; the lake table stays unless told otherwise."""
    _call(config, "remove_table", source=table, drop_target=drop_target)
    out.print(f"{table} is no longer followed", highlight=False)


@tables_app.command("resync")
def tables_resync(table: TableArgument, config: ConfigFile) -> None:
    """Copy a table again; changes meanwhile are kept."""
    _call(config, "resync_table", source=table)
    out.print(f"{table} will be copied again", highlight=False)


@tables_app.command("move")
def tables_move(table: TableArgument, group: GroupArgument, config: ConfigFile) -> None:
    """Move a table to another group, which copies it again."""
    _call(config, "move_table", source=table, group_name=group)
    out.print(f"{table} moves to the group {group}", highlight=False)


@groups_app.command("list")
def groups_list(config: ConfigFile, as_json: Json = False) -> None:
    """Show the groups: slot, publication, WAL that the slot retains."""
    _show(_registry_rows(config, "groups"), as_json, GROUP_COLUMNS)


@groups_app.command("create")
def groups_create(group: GroupArgument, config: ConfigFile) -> None:
    """Create a group with its own slot and publication."""
    _call(config, "create_group", name=group)


@groups_app.command("drop")
def groups_drop(group: GroupArgument, config: ConfigFile) -> None:
    """Drop a group with its slot and publication; lake tables stay."""
    _call(config, "drop_group", name=group)


@groups_app.command("enable")
def groups_enable(group: GroupArgument, config: ConfigFile) -> None:
    """Run a group again; it catches up from where it was."""
    _call(config, "enable_group", name=group)


@groups_app.command("disable")
def groups_disable(group: GroupArgument, config: ConfigFile) -> None:
    """Stop a group; the server keeps its WAL until it is enabled."""
    _call(config, "disable_group", name=group)


STATUS_COLUMNS = (
    "group_name",
    "source",
    "target",
    "state",
    "rows_synced",
    "applied_lsn",
    "last_sync_at",
    "error_message",
)
GROUP_COLUMNS = ("name", "enabled", "slot_name", "publication", "tables", "retained_bytes")


def _registry_rows(config: Path, function: str) -> list[dict[str, Any]]:
    from aqueduck.config import load_config
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.registry import rows_of

    with connect(load_config(config).source.dsn) as conn:
        return rows_of(conn, function)


def _call(config: Path, function: str, **arguments: Any) -> None:
    from aqueduck.config import load_config
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.registry import call

    with connect(load_config(config).source.dsn) as conn:
        call(conn, function, **arguments)


def _show(rows: list[dict[str, Any]], as_json: bool, wanted: tuple[str, ...]) -> None:
    if as_json:
        print(json.dumps(rows, default=str))
        return
    columns = [name for name in wanted if rows and name in rows[0]]
    table = Table(*columns)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in columns))
    out.print(table if rows else "nothing yet")


@app.command()
def verify(config: ConfigFile, as_json: Json = False) -> None:
    """Compare source and lake table by table; exits 1 on a difference."""
    from aqueduck.app.verify import verify_tables
    from aqueduck.config import load_config

    results = verify_tables(load_config(config))
    if as_json:
        print(json.dumps([r.to_dict() for r in results]))
    else:
        table = Table("table", "source rows", "lake rows", "content")
        for r in results:
            table.add_row(
                r.table, f"{r.source_rows:,}", f"{r.lake_rows:,}", "identical" if r.same else "DIFFERENT"
            )
        out.print(table)
    if not all(r.same for r in results):
        raise typer.Exit(1)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="drain, mixed, big, copy or freshness.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    rows: Annotated[int | None, typer.Option(help="Fewer or more rows than the standard run.")] = None,
) -> None:
    """Measure against PostgreSQL's own limit in the same run."""
    from aqueduck.app.bench import run_bench

    run_bench(name, as_json=as_json, rows=rows)


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
