"""
The preflight and the set-up of a fan-out: `check` and `init` for a file of this flow.

`run_fanout_checks` creates nothing: for a lake that does not exist yet, it checks the place where it would be
created. `init_fanout` creates the lakes of all destinations with their tables, so that a first run only has
to seed them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.lake_place import LakePlace
from aqueduck.fanout.service import FanoutService
from aqueduck.lake.destinations.cycle import Destination
from aqueduck.lake.destinations.destination import check_target, make_tables, read_state
from aqueduck.lake.destinations.destination_table import find_table
from aqueduck.lake.session.catalog import catalog_file, catalog_place
from aqueduck.lake.session.engine import is_remote
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.source_lake import ReadPlan
from aqueduck.model.errors import (
    AqueduckError,
    CatalogUnreachableError,
    DataPathError,
    LakeWriteError,
    own_error,
)
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier
from aqueduck.service.check_lake import check_state_dir, file_catalog_problem, folder_problem, repair
from aqueduck.service.check_server import CheckResult, result_of
from aqueduck.service.check_spark import spark_checks
from aqueduck.state_files.destinations import state_path
from aqueduck.web.server import check_server

__all__ = ["init_fanout", "run_fanout_checks"]

THREADS = 4
SHOWN = 20
"""Up to this many destinations are listed one by one when all pass; otherwise only their number."""


def run_fanout_checks(config: FanoutConfig, env: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Run every check that can be run; checks that depend on an unreadable source are skipped."""
    service = FanoutService(config, env=env)
    pool = LakePool(max_open=THREADS)
    try:
        plan: list[ReadPlan] = []
        return [
            *_source_checks(service, pool, plan),
            *_destination_checks(service, pool, plan),
            result_of(
                "state directory",
                check_state_dir,
                str(state_path(config).parent),
                [state_path(config).parent],
            ),
            result_of("HTTP server", check_server, config.server, env),
            *spark_checks(config.spark),
        ]
    finally:
        service.source.close()
        pool.close()


def _source_checks(service: FanoutService, pool: LakePool, plan: list[ReadPlan]) -> Iterator[CheckResult]:
    """Check the source; `plan` receives how to read it."""

    def table() -> str:
        plan.append(service.source.plan_scan())
        names = ", ".join(plan[0].source.columns[k].name for k in plan[0].keys)
        return f"{plan[0].table.qualified} at lake snapshot {plan[0].end}, " + (
            f"keys {names}" if names else "append-only"
        )

    def readable() -> str:
        with pool.use(plan[0].place, read_only=True) as lake:
            place = f"{lake.table(plan[0].reads[0].table)} at (version => {plan[0].end})"
            lake.execute(f"from {place} limit 1", doing="reading the source's files")
        return f"{service.source.rows(plan[0]):,} rows"

    def destinations() -> str:
        service.prepare()
        if problems := service.status.left_out:
            name, problem = next(iter(problems.items()))
            raise LakeWriteError(
                f"{len(problems)} of the table or the pattern are left out, {name} among them: {problem}"
            )
        return f"{len(service.served)} served here, {len(service.served.elsewhere)} by other instances"

    found = result_of("source", table)
    yield found
    if found.ok:
        yield result_of("source files", readable)
        yield result_of("destinations", destinations)


def _destination_checks(
    service: FanoutService, pool: LakePool, plan: Sequence[ReadPlan]
) -> Iterator[CheckResult]:
    mine = [one.destination for one in service.served]

    def one(destination: Destination) -> CheckResult:
        return result_of(f"destination {destination.id}", _check_destination, pool, destination, plan)

    with ThreadPoolExecutor(max_workers=THREADS) as threads:
        results = list(threads.map(one, mine))
    failed = [r for r in results if not r.ok]
    yield from results if len(results) <= SHOWN else failed
    if len(results) > SHOWN:
        yield CheckResult(
            "all destinations", not failed, f"{len(results) - len(failed)} of {len(results)} pass"
        )


def _check_destination(pool: LakePool, destination: Destination, plan: Sequence[ReadPlan]) -> str:
    place = destination.place
    _check_data_path(pool, place)
    if not _has_catalog(place):
        return "its lake can be created"
    with pool.use(place, read_only=True) as lake:
        state = read_state(lake, destination.id)
        if state is not None and (not plan or state.fits(destination, plan[0])):
            found = find_table(lake, destination.target)
            if found is not None and state.table in (None, found):
                return f"at lake snapshot {state.cursor} of the source"
        for each in plan:
            check_target(lake, destination, each, state)
    return (
        "not seeded yet"
        if state is None
        else "to be re-seeded: its rows are missing or belong to something else"
    )


def _check_data_path(pool: LakePool, place: LakePlace) -> None:
    if is_remote(place.data_path):
        pool.list_files(place)
        return
    problem = folder_problem(Path(place.data_path))
    if problem:
        raise DataPathError(f"data_path {problem}", hint=repair(Path(place.data_path)))


def _has_catalog(place: LakePlace) -> bool:
    """Whether the lake exists; raises if it can neither be opened nor created."""
    path = catalog_file(place.catalog)
    if path is None:
        return _has_postgres_catalog(place)
    problem = file_catalog_problem(path)
    if problem:
        raise CatalogUnreachableError(f"the catalog file {problem}", hint=repair(path.parent))
    return path.exists() and path.stat().st_size > 0


def _has_postgres_catalog(place: LakePlace) -> bool:
    schema = place.metadata_schema or "public"
    try:
        with (
            connect(catalog_place(place.catalog).removeprefix("postgres:")) as conn,
            translate_errors("read the lake's catalog", conn=conn),
        ):
            row = conn.execute(
                "select to_regclass(format('%%I.ducklake_metadata', %s::text)) is not null, current_user::text,"
                " current_database()::text, to_regnamespace(quote_ident(%s)) is not null,"
                " has_database_privilege(current_database(), 'create')",
                (schema, schema),
            ).fetchone()
            assert row is not None
            exists, role, database, has_schema, may_make_schema = row
            may = may_make_schema
            if has_schema:
                asked = conn.execute("select has_schema_privilege(%s, 'create')", (schema,)).fetchone()
                may = asked is not None and asked[0]
    except AqueduckError as exc:
        raise CatalogUnreachableError(f"the catalog: {exc.message}", hint=exc.hint) from exc
    if not exists and not may:
        what = f"schema {identifier(schema)}" if has_schema else f"database {identifier(database)}"
        raise CatalogUnreachableError(
            f"the role {role} may not create the catalog's tables in the schema {schema}",
            hint=f"grant create on {what} to {identifier(role)}",
        )
    return bool(exists)


def init_fanout(config: FanoutConfig, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """
    Create the lakes and tables of all destinations; yields what was done, and raises at the end if any
    failed.
    """
    service = FanoutService(config, env=env)
    pool = LakePool(max_open=THREADS)
    try:
        service.prepare()
        plan = service.source.plan_scan()
        yield f"source {plan.table.qualified}: lake snapshot {plan.end}"
        destinations = [one.destination for one in service.served]
        with ThreadPoolExecutor(max_workers=THREADS) as threads:
            done = list(threads.map(_maker(pool, plan, config.instance.id), destinations))
    finally:
        service.source.close()
        pool.close()
    for destination, error in zip(destinations, done, strict=True):
        yield f"destination {destination.id}: {error or 'ready'}"
    failed = [error for error in done if error]
    if failed:
        raise LakeWriteError(f"{len(failed)} of {len(done)} destinations could not be created: {failed[0]}")


def _maker(pool: LakePool, plan: ReadPlan, instance: str) -> Callable[[Destination], str | None]:
    def make(destination: Destination) -> str | None:
        try:
            with pool.use(destination.place) as lake:
                make_tables(lake, destination, plan, instance)
        except Exception as exc:  # noqa: BLE001 - an error of one destination must not stop the others
            return str(own_error(exc))
        return None

    return make
