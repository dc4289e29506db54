"""
Connection strings that are kept outside the configuration file, in an environment variable or in a file.

Both are read once, together with the configuration. A `NamedSecret` knows its variable or file, so that a
Spark task on another machine can read it there. No error shows the secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from aqueduck.config.object_store import VARIABLE, read_variable
from aqueduck.config.secret_text import SECRETS_VARIABLE, SecretText
from aqueduck.config.sections import absolute
from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["NamedSecret", "named_secret", "with_secret"]

Kind = Literal["env", "file"]


class NamedSecret(SecretText):
    """
    A secret text from a variable or a file. Without a directory for secrets, only the name of the variable or
    file is pickled.
    """

    __slots__ = ("_kind", "_name")
    _kind: Kind
    _name: str

    def __reduce__(self) -> tuple[Any, ...]:
        if os.environ.get(SECRETS_VARIABLE):
            return super().__reduce__()
        return (_read_in_task, (self._kind, self._name))


def named_secret(kind: Kind, name: str, where: str) -> NamedSecret:
    """The current value of the variable or the file; `where` names the place in error messages."""
    text = read_variable(os.environ, name, where) if kind == "env" else _secret_of_file(name, where)
    secret = NamedSecret(text)
    secret._kind, secret._name = kind, name
    return secret


def _read_in_task(kind: Kind, name: str) -> NamedSecret:
    try:
        return named_secret(
            kind, name, f"a task on an executor needs the {'variable' if kind == 'env' else 'file'}"
        )
    except ConfigError as exc:
        hint = f"set {name} where the executors start, or use a file that every machine has (dsn_file, catalog_file)"
        if kind == "file":
            hint = "put the file at the same path on every machine, readable by the user of the executors"
        raise ConfigError(exc.message, hint=hint) from None


def with_secret(
    values: dict[str, Any], key: str, base_dir: Path, env: Mapping[str, str], where: str
) -> dict[str, Any]:
    """
    The section with its `key` read from the variable `<key>_env` or the file `<key>_file`; errors show
    neither value.
    """
    given = [k for k in (key, f"{key}_env", f"{key}_file") if values.get(k) is not None]
    if len(given) > 1:
        raise ConfigError(f"{where}: has both {' and '.join(given)}", hint="keep one of them")
    if not given or given == [key] or not isinstance(values[given[0]], str):
        return values
    source = values[given[0]]
    if given[0].endswith("_file"):
        return {**values, key: _secret_of_file(absolute(source, base_dir), f"{where}.{given[0]}")}
    if not VARIABLE.fullmatch(source):  # the value may be the secret itself: never show it
        hint = f"write the name of a variable, or use the key {key} for the text"
        raise ConfigError(f"{where}.{given[0]}: must be the name of an environment variable", hint=hint)
    if not env.get(source):
        hint = f"export {source}='host=… dbname=… user=…'" if key == "dsn" else f"export {source}=…"
        raise ConfigError(f"{where}.{given[0]}: the variable {source} is not set", hint=hint)
    return {**values, key: env[source]}


def _secret_of_file(path: str, where: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as exc:  # the key may hold the secret itself: show no path
        what = system_reason(exc) if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{where}: the file cannot be read: {what}", hint="name a file that this user can read"
        ) from None
    if not text:
        raise ConfigError(f"{where}: the file is empty", hint="write the text into it")
    return text
