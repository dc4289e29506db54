"""
Find the oldest lake snapshot that the fan-outs of a lake still need, from their cursors.

A cursor is a row in a destination's own lake.  The lakes are queried one by one, so this takes about as long as
attaching each of them.  A destination that cannot be queried raises, because it may need every lake snapshot.  A
destination without a cursor needs none, because its seed will read the rows of a current one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aqueduck.config.fanout import DestinationConfig, FanoutConfig, assigned, load_fanout
from aqueduck.config.fanout_roster import Roster, values_of
from aqueduck.config.lake_place import resolve
from aqueduck.lake.destinations.destination import read_state
from aqueduck.lake.session.catalog import catalog_place
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.allowed_places import AllowedPlaces
from aqueduck.lake.source.fanout_source import FanoutSource
from aqueduck.lake.upkeep.maintenance import Kept
from aqueduck.model.errors import AqueduckError, ConfigError, MaintenanceError
from aqueduck.state_files.destinations import DestinationsFile, state_path

__all__ = ["destinations_of", "oldest_cursor"]


def oldest_cursor(files: Iterable[str], catalog: str, env: Mapping[str, str] = os.environ) -> Kept:
    """The oldest cursor of the destinations of these fan-out files, and the destination that has it."""
    found: Kept = (None, None)
    for file in files:
        config = load_fanout(file)
        if catalog_place(resolve(config.source, {}, env).catalog) != catalog_place(catalog):
            raise ConfigError(
                f"maintenance.readers: {file} reads another lake", hint="list fan-outs of this lake only"
            )
        for name, cursor in _cursors(config, env):
            if found[0] is None or cursor < found[0]:
                found = cursor, f"the destination {name}"
    return found


def _cursors(config: FanoutConfig, env: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    pool = LakePool(max_open=1, threads=1)
    try:
        for destination in destinations_of(config, env):
            place = config.place_of(destination, env)
            try:
                with pool.use(place) as lake:
                    state = read_state(lake, destination.id)
            except AqueduckError as exc:
                raise MaintenanceError(
                    f"the cursor of the destination {destination.id} cannot be read"
                ) from exc
            if state is not None:
                yield destination.id, state.cursor
    finally:
        pool.close()


def destinations_of(config: FanoutConfig, env: Mapping[str, str]) -> list[DestinationConfig]:
    """The destinations of this instance: from the file, its table, and its pattern (for source values and remembered ones)."""
    named: Sequence[DestinationConfig] = config.destinations
    if config.destinations_table is not None or config.dynamic is not None:
        source = FanoutSource(config, env)
        try:
            named = _found_in_source(config, source, env)
        finally:
            source.close()
    return [d for d in named if assigned(config.instance.partition, d.id)]


def _found_in_source(
    config: FanoutConfig, source: FanoutSource, env: Mapping[str, str]
) -> list[DestinationConfig]:
    plan = source.plan_scan()
    made = DestinationsFile(state_path(config)).recall()
    roster = Roster(config, env, functools.partial(source.canonical, plan), made)
    if config.destinations_table is not None:
        roster.add_rows(source.listed(config.destinations_table, plan), AllowedPlaces(config))
    if config.dynamic is not None:
        roster.add_values([*values_of(config, made, env), *source.values(plan)])
    return roster.destinations
