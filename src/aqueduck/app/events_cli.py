"""The commands of change events: `tail` and `slots`.  What they do is in the modules that they call."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from aqueduck.app.cli_options import Json

__all__ = ["add_events_commands"]

Dsn = Annotated[
    str,
    typer.Option("--dsn", envvar="PG_DSN", help="The database, as libpq keywords or URI.", show_envvar=True),
]
SlotName = Annotated[str, typer.Argument(metavar="SLOT", help="The slot's name.")]

slots_app = typer.Typer(no_args_is_help=True, help="Replication slots: list, create, drop.")


def add_events_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("tail")(tail)
    app.add_typer(slots_app, name="slots")


def tail(
    dsn: Dsn,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="A table to follow; may be given again. By default all."),
    ] = None,
    begin: Annotated[str, typer.Option("--from", help="now, slot (with --slot), or an LSN.")] = "now",
    slot: Annotated[str | None, typer.Option(help="A slot that still has the changes to begin with.")] = None,
    publication: Annotated[
        str | None, typer.Option(help="A publication that exists; by default one for this command alone.")
    ] = None,
    format_: Annotated[
        Literal["json", "flat", "pretty"], typer.Option("--format", help="How changes are printed.")
    ] = "json",
    count: Annotated[int | None, typer.Option(min=1, help="End after so many changes.")] = None,
) -> None:
    """Print changes as they happen; a temporary slot, and nothing is left behind."""
    from aqueduck.app.tail import TailOptions, run_tail

    run_tail(TailOptions(dsn, tuple(table or ()), begin, slot, publication, format_, count))


@slots_app.command("list")
def slots_list(dsn: Dsn, as_json: Json = False) -> None:
    """Show the server's slots and the WAL that each one keeps."""
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.slots import list_slots
    from aqueduck.schema import lsn_text

    with connect(dsn) as conn:
        slots = list_slots(conn)
    rows = [
        {
            "name": s.name,
            "plugin": s.plugin,
            "database": s.database,
            "active": s.active,
            "temporary": s.temporary,
            "confirmed": None if s.confirmed_flush_lsn is None else lsn_text(s.confirmed_flush_lsn),
            "retained_bytes": s.retained_bytes,
            "wal_status": s.invalidation_reason or s.wal_status,
        }
        for s in slots
    ]
    if as_json:
        print(json.dumps(rows))
        return
    shown = Table(*(rows[0] if rows else ()))
    for row in rows:
        shown.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(shown if rows else "no slots")


@slots_app.command("create")
def slots_create(
    name: SlotName,
    dsn: Dsn,
    plugin: Annotated[
        Literal["pgoutput", "test_decoding"], typer.Option(help="What decodes WAL on the server.")
    ] = "pgoutput",
) -> None:
    """Create a permanent slot; one that exists for the same plugin is left as it is."""
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.slots import create_slot
    from aqueduck.schema import lsn_text

    with connect(dsn) as conn:
        position = create_slot(conn, name, plugin)
    print(
        f"slot {name} at {lsn_text(position)}: the server keeps all WAL from there until it is read or dropped"
    )


@slots_app.command("drop")
def slots_drop(name: SlotName, dsn: Dsn) -> None:
    """Drop a slot; an absent one is fine, one that is being read is not."""
    from aqueduck.postgres.connection import connect
    from aqueduck.postgres.slots import drop_slot

    with connect(dsn) as conn:
        drop_slot(conn, name)
    print(f"slot {name} is gone")
