"""
Benchmarks: each starts its own PostgreSQL and measures the limit and Aqueduck in the same run.

`run_bench` finds the bench and prints its result. The benches are in `sync_benches`, `table_benches`,
`tables_bench`, `events_bench` and `fanout_bench`; what they share (server, load, limit, meters) is in `workbench`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

from aqueduck.model.errors import ConfigError

__all__ = ["run_bench"]

PARTITIONS_OF = ("copy", "drain")
CAPTURES_OF = ("big", "drain", "events", "mixed", "small", "varied")


def run_bench(
    name: str,
    *,
    as_json: bool,
    rows: int | None,
    capture: str | None = None,
    partitions: int | None = None,
    **of_tables: Any,
) -> None:
    from aqueduck.lab.bench import events_bench, fanout_bench, sync_benches, table_benches, tables_bench

    benches: dict[str, Callable[..., dict[str, Any]]] = {
        "drain": sync_benches.bench_drain,
        "mixed": sync_benches.bench_mixed,
        "big": sync_benches.bench_big,
        "small": sync_benches.bench_small,
        "varied": sync_benches.bench_varied,
        "copy": table_benches.bench_copy,
        "freshness": table_benches.bench_freshness,
        "events": events_bench.bench_events,
        "fanout": fanout_bench.bench_fanout,
        "tables": tables_bench.bench_tables,
        "tenants": fanout_bench.bench_tenants,
    }
    if name not in benches:
        raise ConfigError(f"there is no bench {name}", hint=f"choose one of: {', '.join(sorted(benches))}")
    console = Console(stderr=True)
    if capture is not None and name not in CAPTURES_OF:
        raise ConfigError(
            f"the bench {name} has no captures", hint=f"those that do: {', '.join(CAPTURES_OF)}"
        )
    if partitions is not None and name not in PARTITIONS_OF:
        raise ConfigError(
            f"the bench {name} has no partitions", hint=f"those that do: {', '.join(PARTITIONS_OF)}"
        )
    if of_tables and name != "tables":
        raise ConfigError(
            f"the bench {name} has no {', '.join(of_tables)}", hint="these belong to the bench tables"
        )
    given = {"capture": capture, "partitions": partitions, **of_tables}
    options = {option: value for option, value in given.items() if value is not None}
    result = benches[name](console, rows, **options)
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        console.print(f"{key:>22}  {value}", highlight=False)
