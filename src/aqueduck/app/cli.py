"""
The command line: parses, calls, prints.  What a command does is in the module it calls.

Every error of ours is one line on stderr and an exit code: 2 for configuration, 1 for the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

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
    name: Annotated[str, typer.Argument(help="drain, mixed or big.")],
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
