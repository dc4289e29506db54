"""
The destinations of a fan-out: those of the file, of a table's rows, and those that the pattern creates for
values.

Ids, routing values and tables are unique. The file takes precedence, then the rows in their order, then the
values; a destination that conflicts with an earlier one is left out with a reason. Pure: the caller passes
the rows, the values, and the function that formats a value like the routing column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from aqueduck.config.fanout import (
    DestinationConfig,
    DynamicConfig,
    FanoutConfig,
    Naming,
    assigned,
    refuse_shared,
)
from aqueduck.config.lake_place import LakeKeys
from aqueduck.config.layout import LAYOUT_KEYS
from aqueduck.config.sections import describe_problems
from aqueduck.model.errors import ConfigError

__all__ = ["LISTED_KEYS", "NOTHING_MADE", "Made", "Places", "Roster", "made_of", "values_of"]

LISTED_KEYS = frozenset(DestinationConfig.model_fields) - {"properties", "catalog_file"} - LAYOUT_KEYS
"""Columns of a table of destinations."""

_HINT = "see docs/fanout.md for every key"

Canonical = Callable[[Sequence[str]], list[str | None]]
"""Formats a value like the routing column; None for a value that is not of the column's type."""


class Places(Protocol):
    """The places that rows of a table may name; `lake.allowed_places` checks them against the host."""

    def refuse(self, row: DestinationConfig) -> None:
        """Raise if the file does not allow the place that a row names."""

    def take(self, name: str, value: str | None, place: LakeKeys, lake: str, *, is_row: bool) -> None:
        """Reserve a lake, by its address: rows may not name it."""

    def refuse_taken(self, row: DestinationConfig, value: str, lake: str) -> None:
        """Raise if the row names a reserved lake."""


Made = frozenset[tuple[str, str]]
"""Routing values with a destination from the pattern, and its lake, as text."""
NOTHING_MADE = Made()


def made_of(config: FanoutConfig, destinations: Iterable[DestinationConfig], env: Mapping[str, str]) -> Made:
    """
    The record of destinations that the pattern created, kept so that they are found after their rows are
    gone.
    """
    source = config.source_address(env)
    return frozenset(
        (d.routing_value, json.dumps([source, d.id, config.address_of(d, env)])) for d in destinations
    )


def values_of(config: FanoutConfig, made: Made, env: Mapping[str, str]) -> list[str]:
    """The recorded values for which the pattern would create the same destination again."""
    pattern = config.dynamic
    if pattern is None:
        return []
    return sorted({value for value, _ in made if _made_before(config, value, made, env)})


def _made_before(
    config: FanoutConfig, value: str, made: Made, env: Mapping[str, str]
) -> list[DestinationConfig]:
    """The destination of a value as the pattern created it; None if it did not, or if the pattern has changed."""
    assert config.dynamic is not None
    ways: tuple[Naming, ...] = ("now", "before", "apart")
    named = [config.dynamic.destination(value, naming) for naming in ways]
    return [each for each in named if made_of(config, [each], env) <= made][:1]


class Roster:
    """All destinations of all instances, and why others were left out."""

    def __init__(
        self, config: FanoutConfig, env: Mapping[str, str], canonical: Canonical, made: Made = NOTHING_MADE
    ) -> None:
        self.destinations: list[DestinationConfig] = []
        self.left_out: dict[str, str] = {}
        """The problem of each destination that was left out, by id."""
        self._config, self._env, self._canonical, self._made = config, env, canonical, made
        self._ids: set[str] = set()
        self._values: set[str] = set()
        """Formatted like the routing column; includes the values of destinations that were left out."""
        self._tables = {config.source_claim(env): "the source"}
        self._addresses = {config.source_address(env)}
        for each, value in self._with_values(config.destinations):
            self._take(each, value or each.routing_value)

    def add_rows(self, rows: Iterable[Mapping[str, str]], places: Places) -> None:
        """Add the rows of a table; leave out invalid rows and those that the file does not allow."""
        self._take_places(places)
        for each, value in self._with_values(self._described(rows, places)):
            try:
                if value is None:
                    raise ConfigError("routing_value is not of the routing column's type")
                if assigned(self._config.instance.partition, each.id):
                    self._config.place_of(each, self._env)
                lake = self._config.lake_of(each, self._env)
                places.refuse_taken(each, value, lake)
                self._take(each, value)
                places.take(f"the destination {each.id}", value, each, lake, is_row=True)
            except ConfigError as exc:
                self.left_out[each.id] = str(exc)

    def _take_places(self, places: Places) -> None:
        """The lakes of the source, of the file's destinations, and of those that the pattern made."""
        config, env = self._config, self._env
        places.take("the source", None, config.source, config.lake_of(config.source, env), is_row=False)
        values = values_of(config, self._made, env)
        made = [each for value in values for each in _made_before(config, value, self._made, env)]
        for each, value in self._with_values([*self.destinations, *made]):
            lake = config.lake_of(each, env)
            places.take(f"the destination {each.id}", value, each, lake, is_row=False)

    def add_values(self, values: Sequence[str]) -> list[DestinationConfig]:
        """Create destinations with the pattern for values that have none; returns the new ones."""
        pattern = self._config.dynamic
        before = len(self.destinations)
        if pattern is not None and values:
            for value, written in zip(values, self._canonical(values), strict=True):
                if value and written is not None and written not in self._values:
                    self._take_named(value, written, pattern)
        return self.destinations[before:]

    def _take_named(self, value: str, written: str, pattern: DynamicConfig) -> None:
        """
        The earlier destination of a value; otherwise a new one, with a name distinct from lakes that differ
        only in case.
        """
        each = pattern.destination(value)
        address = self._config.address_of(each, self._env)
        claimed = self._config.claim_of(each, self._env) in self._tables
        if found := _made_before(self._config, value, self._made, self._env):
            [each] = found
        elif claimed and address not in self._addresses:
            each = pattern.destination(value, "apart")
        try:
            self._take(each, written)
        except ConfigError as exc:
            self.left_out[each.id] = str(exc)
            self._values.add(written)

    def _with_values(
        self, destinations: Sequence[DestinationConfig]
    ) -> Iterable[tuple[DestinationConfig, str | None]]:
        values = self._canonical([d.routing_value for d in destinations]) if destinations else []
        return zip(destinations, values, strict=True)

    def _described(self, rows: Iterable[Mapping[str, str]], places: Places) -> list[DestinationConfig]:
        found: list[DestinationConfig] = []
        for number, row in enumerate(rows):
            name = row.get("id", f"row {number + 1}")
            try:
                each = DestinationConfig.model_validate(dict(row))
                _refuse_relative(each)
                places.refuse(each)
                self._config.target_of(each)
                found.append(each)
            except ValidationError as exc:
                problem = describe_problems(exc, {(): DestinationConfig})
                self.left_out[name] = str(ConfigError(problem, hint=_HINT))
            except ConfigError as exc:
                self.left_out[name] = str(exc)
            except ValueError as exc:
                self.left_out[name] = str(ConfigError(str(exc), hint=_HINT))
        return found

    def _take(self, each: DestinationConfig, value: str) -> None:
        """
        The destination with its value formatted like the routing column; raises if its id, value or table is
        taken.
        """
        if each.id in self._ids:
            raise ConfigError(
                "another destination already has this id; the rows of this one are left out",
                hint="give each destination a unique id; dynamic.id may have a prefix, such as tenant-{value}",
            )
        if value in self._values:
            raise ConfigError("another destination has the same routing_value")
        refuse_shared(self._tables, each.id, self._config.claim_of(each, self._env))
        self._addresses.add(self._config.address_of(each, self._env))
        self._ids.add(each.id)
        self._values.add(value)
        self.destinations.append(each)


def _refuse_relative(each: DestinationConfig) -> None:
    """Refuse relative paths: a table's row has no directory that they could refer to."""
    file = each.catalog is not None and not each.catalog.startswith(("postgres:", "postgresql:"))
    paths = [each.data_path, *([(each.catalog or "").removeprefix("sqlite:")] if file else [])]
    if not all(Path(path).is_absolute() or "://" in path for path in paths):
        raise ValueError("data_path and catalog must be absolute paths in a table")
