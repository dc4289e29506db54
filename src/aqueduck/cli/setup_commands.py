"""The commands around a file's life: `new`, `init`, `check` and `uninstall`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aqueduck.cli.options import CONFIG, Adopt, ConfigFile, Dsn, Json, out
from aqueduck.config.fanout import file_is_fanout, load_fanout
from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["add_setup_commands"]

PANEL = "Set up"


def add_setup_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (new, init, check, uninstall):
        app.command(rich_help_panel=PANEL)(command)


def new(
    dsn: Dsn,
    config: Annotated[
        Path, typer.Option("--config", "-c", help="The file to write.", metavar="FILE")
    ] = CONFIG,
    schema: Annotated[list[str] | None, typer.Option(help="Only tables of this schema; repeatable.")] = None,
) -> None:
    """Look at a database and write a configuration file with its tables; never a password."""
    from aqueduck.sync.setup.new_file import look_at_database

    if config.exists():
        raise ConfigError(f"{config} exists already", hint="name another file with -c FILE, or move it away")
    made = look_at_database(dsn, schemas=schema or ())
    try:
        with config.open("x", encoding="utf-8") as file:
            file.write(made.text)
    except OSError as exc:
        raise ConfigError(f"{config} cannot be written: {system_reason(exc)}") from exc
    where = "" if config == CONFIG else f" -c {config}"
    out.print(f"{config}: {made.tables} tables, {made.left_out} left out", highlight=False, markup=False)
    out.print(f"next: {made.export}", highlight=False, markup=False, soft_wrap=True)
    out.print(f"      aqueduck check{where}", highlight=False, markup=False, soft_wrap=True)


def init(config: ConfigFile = CONFIG, adopt: Adopt = False, as_json: Json = False) -> None:
    """Create publication, slot and lake, or the lakes of a fan-out; leave alone what is already right."""
    from aqueduck.cli.show import print_json
    from aqueduck.config.events import load_events
    from aqueduck.config.sync import load_config
    from aqueduck.sync.prepare import prepare

    if (events := load_events(config)) is not None:
        from aqueduck.events.run import init_events

        lines = iter([init_events(events)])
    elif file_is_fanout(config):
        from aqueduck.fanout.check import init_fanout

        lines = init_fanout(load_fanout(config))
    else:
        lines = prepare(load_config(config), adopt=adopt)
    if as_json:
        print_json({"prepared": list(lines)})
        return
    for line in lines:
        out.print(line, highlight=False)


def check(
    config: ConfigFile = CONFIG,
    fix_sql: Annotated[
        bool, typer.Option("--fix-sql", help="Print only the statements, ready for psql.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test what the file requires and print the statement that fixes each problem."""
    from aqueduck.cli.show import print_json, show_checks
    from aqueduck.config.events import load_events
    from aqueduck.config.sync import load_config
    from aqueduck.events.check import run_event_checks
    from aqueduck.service.fix_sql import fix_script
    from aqueduck.sync.check import run_checks

    if fix_sql and as_json:
        raise ConfigError("--fix-sql prints SQL, and --json prints JSON", hint="use one of them")
    if (events := load_events(config)) is not None:
        results = run_event_checks(events)
    elif file_is_fanout(config):
        from aqueduck.fanout.check import run_fanout_checks

        results = run_fanout_checks(load_fanout(config))
    else:
        results = run_checks(load_config(config))
    if as_json:
        print_json([{"name": r.name, "ok": r.ok, "detail": r.detail, "fix": r.fix} for r in results])
    elif fix_sql:
        print(fix_script(results), end="")
    else:
        show_checks(out, results)
    failed = [r for r in results if not r.ok]
    if failed:
        raise typer.Exit(failed[0].error.exit_code if failed[0].error else 1)


def uninstall(
    config: ConfigFile = CONFIG,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise nothing is dropped.")] = False,
    lake: Annotated[
        bool, typer.Option("--lake", help="Also drop Aqueduck's own tables from the lake; your tables stay.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take back slots, publications and registry; without --yes, only print what would be dropped."""
    from aqueduck.cli.show import print_json
    from aqueduck.config.events import load_events
    from aqueduck.config.sync import load_config
    from aqueduck.sync.setup.uninstall import uninstall as take_back

    if load_events(config) is not None:
        raise ConfigError(
            "uninstall is for files with groups; this file is an events flow",
            hint="drop its slot: aqueduck slots drop SLOT; see docs/how-to/uninstall.md",
        )
    if file_is_fanout(config):
        raise ConfigError(
            "uninstall is for files with groups; this file is a fan-out, which has nothing on a server",
            hint="see docs/how-to/uninstall.md",
        )
    verb = "dropped" if yes else "would drop"
    done = []
    for step in take_back(load_config(config), with_lake=lake, do=yes):
        done.append(
            {"object": step.what, "dropped": yes and not step.stays, "stays": step.stays, "note": step.note}
        )
        if not as_json:
            note = (
                f" ({step.note})" if step.note and not step.stays else f": {step.note}" if step.note else ""
            )
            said = f"{'stays' if step.stays else verb}: {step.what}{note}"
            out.print(said, highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print_json(done)
    elif not yes:
        out.print("nothing was dropped; to drop it, add --yes", highlight=False)
