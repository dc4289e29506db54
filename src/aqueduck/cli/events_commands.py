"""The commands for change events: `tail` and `slots`. The modules they call do the work."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.table import Table

from aqueduck.cli.options import Dsn, Json, out

__all__ = ["add_events_commands"]

SlotName = Annotated[str, typer.Argument(metavar="SLOT", help="The slot's name.")]

slots_app = typer.Typer(no_args_is_help=True, help="Replication slots: list, create, drop.")


def add_events_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("tail", rich_help_panel="Slots and changes")(tail)
    app.add_typer(slots_app, name="slots", rich_help_panel="Slots and changes")


def tail(
    dsn: Dsn,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="A table to follow; repeatable. By default all tables."),
    ] = None,
    begin: Annotated[str, typer.Option("--from", help="now, slot (with --slot), or an LSN.")] = "now",
    slot: Annotated[
        str | None, typer.Option(help="A slot that still retains the changes to start from.")
    ] = None,
    publication: Annotated[
        str | None,
        typer.Option(help="An existing publication; by default the command creates a temporary one."),
    ] = None,
    format_: Annotated[
        Literal["json", "flat", "pretty"], typer.Option("--format", help="How changes are printed.")
    ] = "json",
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many changes.")] = None,
) -> None:
    """Print changes as they happen, through a temporary slot; leaves nothing behind."""
    from aqueduck.events.tail import TailOptions, run_tail

    run_tail(TailOptions(dsn, tuple(table or ()), begin, slot, publication, format_, count))


@slots_app.command("list")
def slots_list(dsn: Dsn, as_json: Json = False) -> None:
    """Show the server's slots and the WAL that each one retains."""
    from aqueduck.cli.show import print_json
    from aqueduck.model.schema import lsn_text
    from aqueduck.postgres.publications.slots import list_slots
    from aqueduck.postgres.session.connection import connect

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
        print_json(rows)
        return
    shown = Table(*(rows[0] if rows else ()))
    for row in rows:
        shown.add_row(*("" if value is None else str(value) for value in row.values()))
    out.print(shown if rows else "no slots")


@slots_app.command("create")
def slots_create(
    name: SlotName,
    dsn: Dsn,
    plugin: Annotated[
        Literal["pgoutput", "test_decoding"],
        typer.Option(help="The output plugin that decodes WAL on the server."),
    ] = "pgoutput",
    as_json: Json = False,
) -> None:
    """Create a permanent slot; an existing slot with the same plugin is left unchanged."""
    from aqueduck.cli.show import print_json
    from aqueduck.model.schema import lsn_text
    from aqueduck.postgres.publications.slots import create_slot
    from aqueduck.postgres.session.connection import connect

    _check_name(name)
    with connect(dsn) as conn:
        position = lsn_text(create_slot(conn, name, plugin))
    if as_json:
        print_json({"name": name, "plugin": plugin, "position": position})
    else:
        print(f"slot {name} at {position}: the server keeps all WAL from there until it is read or dropped")


@slots_app.command("drop")
def slots_drop(name: SlotName, dsn: Dsn, as_json: Json = False) -> None:
    """Drop a slot; a missing slot is not an error, an active slot is."""
    from aqueduck.cli.show import print_json
    from aqueduck.postgres.publications.slots import drop_slot
    from aqueduck.postgres.session.connection import connect

    _check_name(name)
    with connect(dsn) as conn:
        drop_slot(conn, name)
    print_json({"name": name, "dropped": True}) if as_json else print(f"slot {name} is dropped")


def _check_name(name: str) -> None:
    """Refuse a name that is too long: the server would truncate it to the name of another slot."""
    from aqueduck.config.sections import slot_name
    from aqueduck.model.errors import ConfigError

    try:
        slot_name(name)
    except ValueError as exc:
        raise ConfigError(f"the slot name {name!r} is not valid", hint=f"it {exc}") from None
