"""
Read the options of Aqueduck's Spark formats, and report invalid ones.

Spark passes options as text and ignores the case of their names.  Underscores are ignored too, so that
`max_rows_per_trigger` and `maxRowsPerTrigger` are the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeVar

from aqueduck.config.credentials import named_secret
from aqueduck.config.secret_text import SecretText
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import TableName, parse_table_name

__all__ = ["Options", "store_properties"]

_SIZE = re.compile(r"(\d+)\s*([kmg]?)i?b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")

T = TypeVar("T", bound=str)


class Options:
    """The options of one use of a format."""

    def __init__(self, source: str, given: Mapping[str, str], known: Collection[str]) -> None:
        """An unknown option is an error, because it is probably mistyped."""
        self._source = source
        self._given = {_plain(name): value for name, value in given.items()}
        unknown = sorted(self._given.keys() - {_plain(name) for name in known})
        if unknown:
            raise ConfigError(
                f"{source} has no option {unknown[0]}", hint=f"its options are: {', '.join(sorted(known))}"
            )

    def text(self, name: str) -> str | None:
        """The option's text; None if it is missing or empty."""
        return self._given.get(_plain(name)) or None

    def needed(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise ConfigError(f"{self._source} requires the option {name}")
        return value

    def secret(self, name: str) -> SecretText:
        """The option `name`, or the text of the variable `<name>_env` or of the file `<name>_file`."""
        given = [key for key in (name, f"{name}_env", f"{name}_file") if self.text(key) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{self._source} has both options {' and '.join(given)}", hint="set only one of them"
            )
        if not given or given == [name]:
            return SecretText(self.needed(name))
        kind: Literal["env", "file"] = "env" if given[0].endswith("_env") else "file"
        return named_secret(kind, self.needed(given[0]), f"{self._source}: the option {given[0]}")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in (*_TRUE, *_FALSE):
            raise self.wrong(name, "true or false")
        return value.lower() in _TRUE

    def number(self, name: str, *, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.strip().isdigit() or int(value) < least:
            raise self.wrong(name, f"a whole number from {least} on")
        return int(value)

    def size(self, name: str) -> int | None:
        """A number of bytes, such as 1048576, 64m or 1GiB."""
        value = self.text(name)
        if value is None:
            return None
        found = _SIZE.fullmatch(value.strip())
        if found is None or int(found[1]) == 0:
            raise self.wrong(name, "a number of bytes such as 1048576, 64m or 1g")
        return int(found[1]) << _UNITS[found[2].lower()]

    def choice(self, name: str, values: Sequence[T]) -> T | None:
        value = self.text(name)
        found = [v for v in values if value is not None and v == value.lower()]
        if value is not None and not found:
            raise self.wrong(name, f"one of {', '.join(values)}")
        return found[0] if found else None

    def names(self, name: str) -> tuple[str, ...]:
        """Comma-separated names."""
        value = self.text(name) or ""
        return tuple(part.strip() for part in _split(value) if part.strip())

    def table(self, name: str, *, default_schema: str, fold_case: bool = True) -> TableName:
        return self._table(name, self.needed(name), default_schema, fold_case)

    def tables(self, name: str) -> tuple[TableName, ...]:
        """Comma-separated tables of PostgreSQL."""
        return tuple(self._table(name, text, "public", True) for text in self.names(name))

    def _table(self, name: str, text: str, default_schema: str, fold_case: bool) -> TableName:
        try:
            return parse_table_name(text, default_schema=default_schema, fold_case=fold_case)
        except ValueError:
            raise self.wrong(name, 'a table such as orders, public.orders or "My Schema"."Orders"') from None

    def wrong(self, name: str, wanted: str) -> ConfigError:
        """The error for an invalid value; it does not show the value."""
        return ConfigError(f"{self._source}: the option {name} must be {wanted}")


def store_properties(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The options `s3_…` of a lake; those that name a variable get its value."""
    named = {name.lower(): value for name, value in given.items() if name.lower().startswith("s3_")}
    return tuple(sorted((name.removesuffix("_env"), _property(name, value)) for name, value in named.items()))


def _property(name: str, value: str) -> str:
    return named_secret("env", value, f"ducklake: the option {name}") if name.endswith("_env") else value


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _split(text: str) -> list[str]:
    """Split at commas outside quotes."""
    return re.findall(r'(?:[^,"]|"(?:[^"]|"")*")+', text)
