"""
Which destinations a fan-out has: those of the file, of a table's rows, and those that the pattern makes of values.

Nobody gets what another has: an id, a routing value or a table.  The file comes first, then rows in their order,
then values; who comes too late is left out with a reason.  Pure: rows and values are given, and so is how the
routing column writes a value.
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
from aqueduck.config.sections import describe_problems
from aqueduck.model.errors import ConfigError

__all__ = ["LISTED_KEYS", "NOTHING_MADE", "Made", "Places", "Roster", "made_of", "values_of"]

LISTED_KEYS = frozenset(DestinationConfig.model_fields) - {"properties", "catalog_file"}
"""Columns of a table of destinations."""

_HINT = "see docs/fanout.md for every key"

Canonical = Callable[[Sequence[str]], list[str | None]]
"""Writes values as the routing column does; None for those that are none of its type."""


class Places(Protocol):
    """Where rows of a table may lead; `lake.allowed_places` looks at the host for it."""

    def refuse(self, row: DestinationConfig) -> None:
        """Raise if the file does not allow the place that a row names."""

    def take(self, name: str, value: str | None, place: LakeKeys, lake: str, *, is_row: bool) -> None:
        """A lake that rows must leave alone, by its address."""

    def refuse_taken(self, row: DestinationConfig, value: str, lake: str) -> None:
        """Raise if the row wants what was taken."""


Made = frozenset[tuple[str, str]]
"""Routing values that have a destination by the pattern, and where it was made, as text."""
NOTHING_MADE = Made()


def made_of(config: FanoutConfig, destinations: Iterable[DestinationConfig], env: Mapping[str, str]) -> Made:
    """What to remember of destinations that the pattern makes, so that they are found when their rows are gone."""
    source = config.source_address(env)
    return frozenset(
        (d.routing_value, json.dumps([source, d.id, config.address_of(d, env)])) for d in destinations
    )


def values_of(config: FanoutConfig, made: Made, env: Mapping[str, str]) -> list[str]:
    """Of what is remembered, the values whose destination the pattern would make where it was made."""
    pattern = config.dynamic
    if pattern is None:
        return []
    return sorted({value for value, _ in made if _made_before(config, value, made, env)})


def _made_before(
    config: FanoutConfig, value: str, made: Made, env: Mapping[str, str]
) -> list[DestinationConfig]:
    """The destination of a value where the pattern made it; nothing if it did not, or the pattern was another one."""
    assert config.dynamic is not None
    ways: tuple[Naming, ...] = ("now", "before", "apart")
    named = [config.dynamic.destination(value, naming) for naming in ways]
    return [each for each in named if made_of(config, [each], env) <= made][:1]


class Roster:
    """All destinations, whichever instance serves them, and why others are left out."""

    def __init__(
        self, config: FanoutConfig, env: Mapping[str, str], canonical: Canonical, made: Made = NOTHING_MADE
    ) -> None:
        self.destinations: list[DestinationConfig] = []
        self.left_out: dict[str, str] = {}
        """The problem, by id."""
        self._config, self._env, self._canonical, self._made = config, env, canonical, made
        self._ids: set[str] = set()
        self._values: set[str] = set()
        """As the routing column writes them; also those that were left out."""
        self._tables = {config.source_claim(env): "the source"}
        self._addresses = {config.source_address(env)}
        for each, value in self._with_values(config.destinations):
            self._take(each, value or each.routing_value)

    def add_rows(self, rows: Iterable[Mapping[str, str]], places: Places) -> None:
        """Take in the rows of a table; a wrong one, or one that the file does not allow, is left out."""
        self._take_places(places)
        for each, value in self._with_values(self._described(rows, places)):
            try:
                if value is None:
                    raise ConfigError("routing_value is none of the routing column's type")
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
        """Let the pattern make destinations of values that nobody has; those that are new."""
        pattern = self._config.dynamic
        before = len(self.destinations)
        if pattern is not None and values:
            for value, written in zip(values, self._canonical(values), strict=True):
                if value and written is not None and written not in self._values:
                    self._take_named(value, written, pattern)
        return self.destinations[before:]

    def _take_named(self, value: str, written: str, pattern: DynamicConfig) -> None:
        """The destination of a value where it was made before; else a new one, apart from a lake that differs in case only."""
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
        """The destination, with the value as the routing column writes it; raises if it wants what another has."""
        if each.id in self._ids:
            raise ConfigError(
                "another destination has the same id, and stays; the rows of this one are left out",
                hint="give each an id of its own; dynamic.id may have a prefix, such as tenant-{value}",
            )
        if value in self._values:
            raise ConfigError("another destination has the same routing_value")
        refuse_shared(self._tables, each.id, self._config.claim_of(each, self._env))
        self._addresses.add(self._config.address_of(each, self._env))
        self._ids.add(each.id)
        self._values.add(value)
        self.destinations.append(each)


def _refuse_relative(each: DestinationConfig) -> None:
    """A row of a table is in no directory."""
    file = each.catalog is not None and not each.catalog.startswith(("postgres:", "postgresql:"))
    paths = [each.data_path, *([(each.catalog or "").removeprefix("sqlite:")] if file else [])]
    if not all(Path(path).is_absolute() or "://" in path for path in paths):
        raise ValueError("data_path and catalog need absolute paths in a table")
