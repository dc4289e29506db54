"""
The commands of the registry: `tables`, `groups` and `settings`.

Each command calls the registry function of the same name (`postgres.registry.registry`), which can also be
called with SQL. The service acts on the result.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aqueduck.cli.completion import complete_group, complete_new_table, complete_setting, complete_table
from aqueduck.cli.options import CONFIG, ConfigFile, Json, out

if TYPE_CHECKING:
    from psycopg.errors import Diagnostic

__all__ = ["add_registry_commands", "read_status"]

tables_app = typer.Typer(
    no_args_is_help=True, help="Add, remove, move, pause or re-copy tables; the service acts at once."
)
groups_app = typer.Typer(no_args_is_help=True, help="Groups: list, create, drop, enable, disable, release.")
settings_app = typer.Typer(no_args_is_help=True, help="Settings of all groups, of a group or of a table.")

TableArgument = Annotated[
    str,
    typer.Argument(
        help="The source table, such as public.orders.", metavar="TABLE", autocompletion=complete_table
    ),
]
NewTable = Annotated[
    str,
    typer.Argument(
        help="The source table, such as public.orders.", metavar="TABLE", autocompletion=complete_new_table
    ),
]
GroupArgument = Annotated[
    str, typer.Argument(help="The group's name.", metavar="GROUP", autocompletion=complete_group)
]
OfGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        help="The group; needed only if several groups have the table.",
        autocompletion=complete_group,
    ),
]


def add_registry_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for inner, name in ((tables_app, "tables"), (groups_app, "groups"), (settings_app, "settings")):
        app.add_typer(inner, name=name, rich_help_panel="Tables, groups and settings")


@tables_app.command("list")
def tables_list(config: ConfigFile = CONFIG, as_json: Json = False) -> None:
    """Show the registered configuration of each table."""
    _show_rows(config, "tables", as_json)


@tables_app.command("add")
def tables_add(
    table: NewTable,
    config: ConfigFile = CONFIG,
    target: Annotated[
        str | None, typer.Option(help="The lake table; by default the same name in the schema main.")
    ] = None,
    group: Annotated[str, typer.Option(help="The group.")] = "default",
    mode: Annotated[str, typer.Option(help="upsert, append, history or soft_delete.")] = "upsert",
    source_column: Annotated[
        str | None,
        typer.Option(help="The target's column that says from which of several sources a row comes."),
    ] = None,
    source_value: Annotated[
        str | None, typer.Option(help="This source's value in that column; by default its name.")
    ] = None,
    no_copy: Annotated[bool, typer.Option("--no-copy", help="Replicate only changes from now on.")] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take over a lake table that Aqueduck did not make.")
    ] = False,
    columns: Annotated[
        str | None, typer.Option(help="Only these columns, separated by commas.", metavar="A,B")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(help="All columns except these, separated by commas.", metavar="A,B")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="Rename a column in the lake; repeatable.", metavar="COLUMN=NAME")
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help="Mask a column: hash, redact or constant:VALUE; repeatable.", metavar="COLUMN=MASK"
        ),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Only rows for which this condition is true.", metavar="CONDITION")
    ] = None,
    partition_by: Annotated[
        str | None,
        typer.Option(
            help="Partition keys of the lake table, such as 'tenant, month(created_at), bucket(16, id)'.",
            metavar="KEYS",
        ),
    ] = None,
    sort_by: Annotated[
        str | None,
        typer.Option(help="Sort keys of the lake table, such as 'created_at desc'.", metavar="KEYS"),
    ] = None,
    target_file_size: Annotated[
        str | None,
        typer.Option(help="The size up to which files are merged, such as 128MiB.", metavar="SIZE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a table to a group; its rows are copied while the stream of the other tables continues."""
    import json

    from aqueduck.config.table_options import read_options

    given = read_options(
        table, columns, exclude, rename or (), mask or (), where, mode,
        partition_by=partition_by, sort_by=sort_by, target_file_size=target_file_size,
    )  # fmt: skip
    options = json.dumps(given)
    said = f"{table} will be {'replicated' if no_copy else 'copied and replicated'}"
    wanted = {
        "source": table,
        "target": target,
        "group_name": group,
        "mode": mode,
        "copy": not no_copy,
        "source_column": source_column,
        "source_value": source_value,
        "options": options,
        "adopt": adopt,
    }
    _call(config, as_json, said, "add_table", **wanted)


@tables_app.command("remove")
def tables_remove(
    table: TableArgument,
    config: ConfigFile = CONFIG,
    drop_target: Annotated[bool, typer.Option("--drop-target", help="Drop the lake table as well.")] = False,
    group: OfGroup = None,
    as_json: Json = False,
) -> None:
    """Remove a table from its group; the lake table is kept unless --drop-target is given."""
    said = f"{table} is no longer replicated"
    _call(config, as_json, said, "remove_table", source=table, drop_target=drop_target, group_name=group)


@tables_app.command("resync")
def tables_resync(
    table: TableArgument, config: ConfigFile = CONFIG, group: OfGroup = None, as_json: Json = False
) -> None:
    """Copy a table again; changes that arrive during the copy are kept."""
    said = f"{table} will be re-copied"
    _call(config, as_json, said, "resync_table", source=table, group_name=group)


@tables_app.command("retry")
def tables_retry(
    table: TableArgument, config: ConfigFile = CONFIG, group: OfGroup = None, as_json: Json = False
) -> None:
    """Retry an errored table at once, after its cause was repaired."""
    _call(config, as_json, f"{table} will be retried", "retry_table", source=table, group_name=group)


@tables_app.command("disable")
def tables_disable(
    table: TableArgument, config: ConfigFile = CONFIG, group: OfGroup = None, as_json: Json = False
) -> None:
    """Stop applying a table's changes; they are parked in the lake, and the other tables continue."""
    said = f"changes of {table} are parked until it is enabled"
    _call(config, as_json, said, "disable_table", source=table, group_name=group)


@tables_app.command("enable")
def tables_enable(
    table: TableArgument, config: ConfigFile = CONFIG, group: OfGroup = None, as_json: Json = False
) -> None:
    """Resume a disabled table; its parked changes are applied first."""
    said = f"{table} is replicated again"
    _call(config, as_json, said, "enable_table", source=table, group_name=group)


@tables_app.command("move")
def tables_move(
    table: TableArgument,
    group: GroupArgument,
    config: ConfigFile = CONFIG,
    from_group: Annotated[
        str | None,
        typer.Option("--from", help="The old group; needed only if several groups have the table."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Move a table to another group, which continues from the old group's position."""
    said = f"{table} moves to the group {group}"
    _call(config, as_json, said, "move_table", source=table, group_name=group, from_group=from_group)


@groups_app.command("list")
def groups_list(config: ConfigFile = CONFIG, as_json: Json = False) -> None:
    """Show the groups: slot, publication, WAL that the slot retains."""
    _show_rows(config, "groups", as_json)


@groups_app.command("create")
def groups_create(
    group: GroupArgument,
    config: ConfigFile = CONFIG,
    publication: Annotated[
        str | None, typer.Option(help="The publication; by default aqueduck_ and the group's name.")
    ] = None,
    slot: Annotated[
        str | None, typer.Option(help="The slot; by default aqueduck_ and the group's name.")
    ] = None,
    capture: Annotated[str | None, typer.Option(help="stream, poll or auto; by default auto.")] = None,
    lake: Annotated[
        str | None,
        typer.Option(help="The data path of its lake; by default that of the first service that takes it."),
    ] = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Take over a slot and a publication that Aqueduck did not create.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a group with its own slot and publication."""
    given = {
        "name": group,
        "publication": publication,
        "slot_name": slot,
        "capture": capture,
        "lake": lake,
        "adopt": adopt,
    }
    _call(config, as_json, f"the group {group} is created", "create_group", **given)


@groups_app.command("drop")
def groups_drop(
    group: GroupArgument,
    config: ConfigFile = CONFIG,
    with_tables: Annotated[
        bool, typer.Option("--with-tables", help="Remove its tables from replication as well.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Drop a group with its slot and publication; lake tables stay."""
    said = f"the group {group} is dropped, its lake tables stay"
    _call(config, as_json, said, "drop_group", name=group, with_tables=with_tables)


@groups_app.command("enable")
def groups_enable(group: GroupArgument, config: ConfigFile = CONFIG, as_json: Json = False) -> None:
    """Enable a group again; it catches up from its last position."""
    _call(config, as_json, f"the group {group} runs again", "enable_group", name=group)


@groups_app.command("disable")
def groups_disable(group: GroupArgument, config: ConfigFile = CONFIG, as_json: Json = False) -> None:
    """Disable a group; the server retains its WAL until it is enabled."""
    said = f"the group {group} stops; the server retains its WAL"
    _call(config, as_json, said, "disable_group", name=group)


@groups_app.command("release")
def groups_release(group: GroupArgument, config: ConfigFile = CONFIG, as_json: Json = False) -> None:
    """Detach a group from its lake, after the lake has moved; the next service takes it."""
    said = f"the group {group} is free: the next service takes it"
    _call(config, as_json, said, "release_group", name=group)


SettingName = Annotated[
    str,
    typer.Argument(
        help="The setting, such as flush_interval_ms.", metavar="NAME", autocompletion=complete_setting
    ),
]
ForGroup = Annotated[str | None, typer.Option("--group", help="For this group only.")]
ForTable = Annotated[str | None, typer.Option("--table", help="For this table only.")]


@settings_app.command("list")
def settings_list(config: ConfigFile = CONFIG, as_json: Json = False) -> None:
    """Show all settings with their global values."""
    _show_rows(config, "list_settings", as_json)


@settings_app.command("get")
def settings_get(
    name: SettingName,
    config: ConfigFile = CONFIG,
    group: ForGroup = None,
    table: ForTable = None,
    as_json: Json = False,
) -> None:
    """Print the effective value, globally, for a group or for a table."""
    _call(config, as_json, "{}", "get_setting", name=name, group_name=group, source=table)


@settings_app.command("set")
def settings_set(
    name: SettingName,
    value: Annotated[str | None, typer.Argument(help="The value; omit it to reset the setting.")] = None,
    *,
    config: ConfigFile = CONFIG,
    group: ForGroup = None,
    table: ForTable = None,
    as_json: Json = False,
) -> None:
    """Set or reset a value, globally, for a group or for a table."""
    said = f"{name} is {value}" if value is not None else f"{name} is reset"
    _call(config, as_json, said, "set_setting", name=name, value=value, group_name=group, source=table)


def _show_rows(config: Path, function: str, as_json: bool) -> None:
    """Print the rows that a registry function returns, as a table or as JSON."""
    from aqueduck.cli import show

    rows = read_rows(config, function)
    if as_json:
        show.print_json(rows)
        return
    views = {
        "groups": show.show_groups,
        "tables": show.show_tables,
        "list_settings": show.show_settings,
    }
    views[function](out, rows)


def read_rows(config: Path, function: str) -> list[dict[str, Any]]:
    """The rows that a registry function returns."""
    from aqueduck.config.sync import load_config
    from aqueduck.postgres.registry.registry import rows_of
    from aqueduck.postgres.session.connection import connect

    with connect(load_config(config).source.dsn) as conn:
        return rows_of(conn, function)


def read_status(config: Path) -> list[dict[str, Any]]:
    """The state of each table, with the layout that its options give its target."""
    from aqueduck.config.layout import layout_text
    from aqueduck.config.sync import load_config
    from aqueduck.postgres.registry.registry import rows_of
    from aqueduck.postgres.session.connection import connect

    with connect(load_config(config).source.dsn) as conn:
        rows, tables = rows_of(conn, "status"), rows_of(conn, "tables")
    options = {(table["group_name"], table["source"]): table["options"] for table in tables}
    return [
        {**row, "layout": layout_text(options.get((row["group_name"], row["source"]), {}))} for row in rows
    ]


def _call(config: Path, as_json: bool, said: str, function: str, **arguments: Any) -> None:
    """Call a function of the registry; `said` is the message for people, with {} for the function's result."""
    from aqueduck.cli.show import print_json
    from aqueduck.config.sync import load_config
    from aqueduck.postgres.registry.registry import call
    from aqueduck.postgres.session.connection import connect

    with connect(load_config(config).source.dsn) as conn:
        conn.add_notice_handler(_show_notice)
        result = call(conn, function, **arguments)
    if as_json:
        print_json({"called": function, **arguments, "result": result or None})
    else:
        out.print(said.replace("{}", str(result)), highlight=False, markup=False)


def _show_notice(notice: Diagnostic) -> None:
    """Print what a function of the registry has to say besides its result."""
    hint = f". {notice.message_hint}" if notice.message_hint else ""
    print(f"note: {notice.message_primary}{hint}", file=sys.stderr)
