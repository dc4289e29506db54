"""
What the commands print: tables for people, JSON for programs.

The rows come from the registry's functions (docs/sql-api.md), the verdicts from `verify` and the findings
from `check`. This module only formats; `commands` parses arguments and calls the work.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from aqueduck.fanout.verdicts import DestinationComparison
from aqueduck.lake.ledger.lineage import SourceState
from aqueduck.model.errors import VerifyDifferenceError
from aqueduck.service.check_server import CheckResult
from aqueduck.sync.comparing.verify_reads import Progress as ProgressReport
from aqueduck.sync.verify import TableComparison

__all__ = [
    "NOT_COMPARED",
    "print_json",
    "raise_verdict",
    "show_checks",
    "show_destination_verdicts",
    "show_destinations",
    "show_events",
    "show_groups",
    "show_maintenance",
    "show_settings",
    "show_snapshot",
    "show_status",
    "show_tables",
    "show_verdicts",
    "size",
    "span",
    "verify_progress",
]

Row = Mapping[str, Any]

NOT_COMPARED = 3
"""The exit code of `verify` when it found no difference but could not compare everything."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STATES = {
    "PENDING": "yellow",
    "SNAPSHOT": "cyan",
    "CATCHUP": "cyan",
    "STREAMING": "green",
    "ERRORED": "bold red",
}
DESTINATIONS_SHOWN = 50
_DESTINATIONS = {"pending": "yellow", "seeding": "cyan", "live": "green", "errored": "bold red"}
_VERDICTS = {"identical": "green", "different": "bold red", "not compared": "yellow"}


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value, default=str))


def size(bytes_: float | None) -> str:
    """A number of bytes with a unit, for people."""
    if bytes_ is None:
        return "–"
    value, unit = float(bytes_), 0
    while abs(value) >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def span(seconds: float | None) -> str:
    """A duration for people: its two largest units."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, below, name, small in (
        (60, 3600, "min", "s"),
        (3600, 86400, "h", "min"),
        (86400, None, "d", "h"),
    ):
        if below is None or seconds < below:
            inner = {60: 1, 3600: 60, 86400: 3600}[unit]
            return f"{int(seconds // unit)} {name} {int(seconds % unit // inner)} {small}"
    raise AssertionError("unreachable")


def _ago(moment: datetime | None, now: datetime) -> str:
    return "–" if moment is None else span(max(0.0, (now - moment).total_seconds()))


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,}"


# -- the registry


def show_status(out: Console, rows: Sequence[Row], *, now: datetime | None = None) -> None:
    """Tables with their states, followed by their problems."""
    now = now or datetime.now(UTC)
    details = [_details(row) for row in rows]
    columns = ("group", "table", "state", "since", ">rows", ">behind", ">last change")
    compared = any(row.get("verdict", "never") != "never" for row in rows)
    table = _table(*columns, *(["verified"] if compared else []), *(["details"] if any(details) else []))
    for row, detail in zip(rows, details, strict=True):
        behind = f"{size(row['lag_bytes'])}, {span(row['lag_seconds'])}"
        table.add_row(
            escape(row["group_name"]),
            escape(_arrow(row)),
            _state(row),
            _ago(row["state_since"], now),
            _number(row["rows_synced"]),
            "–" if row["lag_bytes"] is None else behind,
            _ago(row["last_sync_at"], now),
            *([_verified(row)] if compared else []),
            *([detail] if any(details) else []),
        )
    out.print(table if rows else "no tables yet: aqueduck tables add TABLE, or list them in the file")
    for row in rows:
        if row.get("verify_note"):
            out.print(f"{row['source']}: {row['verify_note']}", markup=False, highlight=False)
        if row["error_message"]:
            again = (
                ""
                if row["retry_at"] is None
                else f" (again in {span(max(0.0, (row['retry_at'] - now).total_seconds()))})"
            )
            out.print(f"[bold red]{escape(row['source'])}[/]{again}: ", end="")
            out.print(row["error_message"], markup=False, highlight=False)
    if rows and not any(row["running"] for row in rows):
        out.print("[yellow]no service is running: this is the state that the last one left[/]")


def _state(row: Row) -> str:
    state = str(row["state"])
    return f"[{_STATES.get(state, 'white')}]{state}[/]" + ("" if row["enabled"] else " [yellow](disabled)[/]")


def _arrow(row: Row) -> str:
    """Show the lake table where its name is not the default, or where it also holds rows of other sources."""
    source, target, own = row["source"], row["target"], _own_rows(row)
    plain = target == f"main.{source.partition('.')[2]}" and not own
    return source if plain else f"{source} → {target}{own}"


def _own_rows(row: Row) -> str:
    """The condition that selects this source's rows in a target that several sources fill."""
    return "" if row["source_column"] is None else f" ({row['source_column']} = {row['source_value']})"


def _details(row: Row) -> str:
    parts = []
    if row["copy_share"] is not None and row["copy_share"] < 1:
        left = row["copy_seconds_left"]
        parts.append(f"copy {row['copy_share']:.0%}" + ("" if left is None else f", {span(left)} left"))
    if row["parked_rows"]:
        parts.append(f"{row['parked_rows']:,} parked ({size(row['parked_bytes'])})")
    if row["queued_changes"]:
        parts.append(f"{row['queued_changes']:,} queued ({size(row['queued_bytes'])})")
    if row.get("layout"):
        parts.append(escape(row["layout"]))
    return ", ".join(parts)


def show_destinations(out: Console, rows: Sequence[Row]) -> None:
    """The destinations of a fan-out."""
    table = _table(
        "destination", "state", ">cursor", ">behind", ">rows", "last change", "verified", "error", "next try"
    )
    for row in rows:
        behind = f"{row['lag_snapshots']:,} ({span(row['lag_seconds'])})" if row["lag_snapshots"] else "–"
        table.add_row(
            escape(str(row["destination_id"])),
            f"[{_DESTINATIONS.get(row['state'], 'white')}]{row['state']}[/]",
            _number(row["last_snapshot_id"]),
            behind,
            _number(row["rows_replicated"]),
            str(row["last_change_at"] or "–"),
            _verified(row),
            escape(str(row["last_error"] or "")),
            str(row["retry_at"] or "–"),
        )
    out.print(table if rows else "nothing yet")


def _verified(row: Row) -> str:
    """The last verdict of the service's own comparison and its time; an older service wrote none."""
    verdict, at = row.get("verdict", "never"), row.get("verified_at")
    if verdict == "never":
        return "never"
    style = "green" if verdict == "identical" else "bold red"
    moment = datetime.fromisoformat(at) if isinstance(at, str) else at
    return f"[{style}]{verdict}[/], {_ago(moment, datetime.now(UTC))} ago"


def show_events(out: Console, row: Row) -> None:
    """The position of an events flow."""
    table = _table("slot", "runs", "sink", "bookmark", "commit time", ">events", ">behind", ">WAL kept")
    table.add_row(
        escape(row["slot_name"]),
        "[green]yes[/]" if row["running"] else "[yellow]no[/]",
        escape(row["sink"]),
        row["bookmark"] or "–",
        row["commit_time"] or "–",
        _number(row["events"]),
        size(row["lag_bytes"]),
        size(row["retained_bytes"]),
    )
    out.print(table)
    if not row["slot_exists"]:
        out.print(f"the slot {row['slot_name']} does not exist: aqueduck init", markup=False, highlight=False)
    if row["last_error"]:
        out.print(f"last error, {row['last_error_at']}: {row['last_error']}", markup=False, highlight=False)


def show_groups(out: Console, rows: Sequence[Row]) -> None:
    """Groups with their slots, followed by notes about them."""
    table = _table(
        "group", "runs", ">tables", ">errored", "slot", "publication", ">WAL kept", ">staged", ">restarts"
    )
    for row in rows:
        runs = (
            "[green]yes[/]"
            if row["running"]
            else "[yellow]no[/]"
            if row["enabled"]
            else "[yellow]disabled[/]"
        )
        errored = row["tables_errored"]
        table.add_row(
            escape(row["name"]),
            runs,
            _number(row["tables"]),
            f"[bold red]{errored}[/]" if errored else "0",
            escape(row["slot_name"]),
            escape(row["publication"]),
            size(row["retained_bytes"]),
            size(row["staged_bytes"]),
            _number(row["restarts"]),
        )
    out.print(table if rows else "no groups yet: aqueduck init")
    for row in rows:
        for text in (row["note"], row["error_message"]):
            if text:
                out.print(f"{row['name']}: {text}", markup=False, highlight=False)


def show_tables(out: Console, rows: Sequence[Row]) -> None:
    """The registered configuration of each table."""
    table = _table("group", "source", "target", "mode", "copy", "state", "from", "settings")
    for row in rows:
        table.add_row(
            escape(row["group_name"]),
            escape(row["source"]),
            escape(row["target"] + _own_rows(row)),
            row["mode"],
            "yes" if row["copy"] else "no",
            _state(row),
            "file" if row["created_by_file"] else "SQL",
            escape(", ".join(f"{name}={value}" for name, value in row["settings"].items())),
        )
    out.print(table if rows else "no tables yet: aqueduck tables add TABLE, or list them in the file")


def show_settings(out: Console, rows: Sequence[Row]) -> None:
    """Global values; those that differ from the default are marked."""
    table = _table("setting", ">value", ">default", "levels", "meaning")
    for row in rows:
        own = row["value"] != row["default_value"]
        value = f"[bold]{row['value']}[/]" if own else str(row["value"])
        table.add_row(row["name"], value, row["default_value"], ", ".join(row["levels"]), row["description"])
    out.print(table)


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


# -- check


def show_checks(out: Console, results: Sequence[CheckResult]) -> None:
    """One line for each requirement, with the statement that fixes it."""
    for r in results:
        mark = "[red]FAIL[/]" if not r.ok else "[yellow]note[/]" if r.fix else "[green]ok  [/]"
        out.print(f"{mark} {escape(r.name)}: ", end="")
        out.print(r.detail, highlight=False, markup=False)
        if r.fix:
            out.print(f"       fix: {r.fix}", highlight=False, markup=False, soft_wrap=True)


# -- verify


def show_verdicts(out: Console, results: Sequence[TableComparison]) -> None:
    """One line for each table, followed by the first keys that differ."""
    table = _table("table", ">source rows", ">lake rows", "verdict", "position", "note")
    for r in results:
        compared = r.verdict != "not compared"
        table.add_row(
            escape(r.table),
            _number(r.source_rows if compared else None),
            _number(r.lake_rows if compared else None),
            f"[{_VERDICTS[r.verdict]}]{r.verdict}[/]",
            r.position or "–",
            escape(r.note or ""),
        )
    out.print(table)
    for r in results:
        if r.differences:
            count = f"{'more than ' if r.more else ''}{r.differing:,}"
            out.print(f"{r.table}: {count} keys differ; the first:", markup=False, highlight=False)
            for d in r.differences:
                key = ", ".join(f"{name}={value}" for name, value in d["key"].items())
                out.print(f"  {d['kind']:8}  {key}", markup=False, highlight=False)


def show_destination_verdicts(out: Console, results: Sequence[DestinationComparison]) -> None:
    """One line for each destination; if there are many, only those that are not identical."""
    shown = [r for r in results if r.verdict != "identical"] if len(results) > DESTINATIONS_SHOWN else results
    table = _table("destination", ">source rows", ">rows", "verdict", ">lake snapshot", "note")
    for r in shown:
        table.add_row(
            escape(r.destination),
            _number(r.source_rows),
            _number(r.rows),
            f"[{_VERDICTS[r.verdict]}]{r.verdict}[/]",
            _number(r.cursor),
            escape(r.note or ""),
        )
    if shown:
        out.print(table)
    if len(shown) < len(results):
        out.print(f"{len(results) - len(shown):,} destinations are identical", highlight=False)


def raise_verdict(results: Sequence[TableComparison]) -> None:
    """Raise if any table differs."""
    differing = [r for r in results if r.verdict == "different"]
    if not differing:
        return
    first = differing[0]
    others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    raise VerifyDifferenceError(
        f"{first.table}{others} of {len(results)} tables: {first.source_rows:,} rows in the source,"
        f" {first.lake_rows:,} in the lake",
        hint=first.note or f"aqueduck tables resync -c FILE {first.table}",
    )


@contextlib.contextmanager
def verify_progress(errors: Console) -> Iterator[ProgressReport]:
    """A progress bar for each table on a terminal; nothing elsewhere."""
    columns = (TextColumn("{task.fields[table]}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def report(table: str, doing: str, share: float) -> None:
            if table not in bars:
                bars[table] = progress.add_task(doing, total=1.0, table=table)
            progress.update(bars[table], description=doing, completed=share)

        yield report


def show_maintenance(console: Console, reports: Sequence[Row]) -> None:
    """What maintenance did to each table, before and after, and to the lake's snapshots."""
    for report in reports:
        table = Table("table", "rows flushed", "files", "size", "delete files", "merged", "rewritten")
        for column in table.columns[1:]:
            column.justify = "right"
        for t in report["tables"]:
            table.add_row(
                escape(t["table"]),
                f"{t['rows_flushed']:,}",
                f"{t['files_before']:,} → {t['files_after']:,}",
                f"{size(t['bytes_before'])} → {size(t['bytes_after'])}",
                f"{t['delete_files_before']:,} → {t['delete_files_after']:,}",
                f"{t['files_merged']:,}",
                f"{t['files_rewritten']:,}",
            )
        console.print(f"[bold]{escape(report['lake'])}[/]", table)
        past = report["expiry"]
        console.print(
            f"lake snapshots {past['snapshots_before']:,} → {past['snapshots_after']:,},"
            f" old files removed {past['files_removed']:,}, orphans removed {past['orphans_removed']:,}"
            + (f"; kept for {past['kept_for']}" if past["kept_for"] else ""),
            highlight=False,
            markup=False,
        )
        rest = "" if report["complete"] else "; not finished: the next run continues"
        console.print(
            f"{span(report['seconds'])}, commits waited at most {span(report['longest_hold_seconds'])}{rest}",
            highlight=False,
        )


def show_snapshot(out: Console, state: SourceState) -> None:
    """One lake snapshot, its source time, and how to read it."""
    when = "" if state.source_time is None else f", committed at {state.source_time.isoformat()}"
    out.print(f"snapshot [bold]{state.snapshot}[/]: the source up to {state.lsn}{when}", highlight=False)
    if not state.reached:
        out.print("[yellow]the lake may not have all changes up to that point yet[/]")
    out.print(
        f"read it with: select … from lake.main.TABLE at (version => {state.snapshot})", highlight=False
    )
