"""
The base of every error that Aqueduck raises on purpose, and how one crosses Spark as text.

The errors themselves are in the modules beside this one, by subject.
"""

from __future__ import annotations

import enum
import os
import re
import traceback
from typing import Any, ClassVar

__all__ = ["AqueduckError", "Retry", "error_codes", "own_error", "system_reason"]

_CODE = re.compile(r"\[([a-z]+\.[a-z_]+)\] ")
_SQLSTATE = re.compile(r"(?:\s+SQLSTATE: [0-9A-Z]{5})+\s*$")
_TABLE = re.compile(r" \(table ([^()]*)\)$")
_OFFSET = re.compile(r" \(at byte (\d+)\)$")
_FIX = ". Fix: "


class Retry(enum.Enum):
    """Who acts after an error: the service, which retries, or a person."""

    AUTO = "auto"
    OPERATOR = "operator"


class AqueduckError(Exception):
    """The base of all errors that Aqueduck raises on purpose."""

    code: ClassVar[str] = "aqueduck.error"
    retry: ClassVar[Retry] = Retry.OPERATOR
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        table: str | None = None,
        offset: int | None = None,
    ) -> None:
        """`offset` says where in the bytes that were read something is wrong."""
        self.offset = offset
        self.message = _one_line(message).removesuffix(".")
        self.hint = _one_line(hint) if hint else None
        self.table = _one_line(table) if table else None
        super().__init__(self.message)

    def __str__(self) -> str:
        where = "" if self.offset is None else f" (at byte {self.offset})"
        table = f" (table {self.table})" if self.table else ""
        text = f"[{self.code}] {self.message}{where}{table}"
        return f"{text}{_FIX}{self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {"hint": self.hint, "table": self.table, "offset": self.offset}
        return _rebuild, (type(self), self.message, keywords)

    @staticmethod
    def from_text(text: str) -> AqueduckError | None:
        """
        Rebuild the error that a piece of text, such as a Spark stack trace, ends in.

        The last line with a known code counts: a traceback puts the error that was raised
        after its causes.  Text without a known code gives `None`.
        """
        for line in reversed(text.splitlines()):
            for found in _CODE.finditer(line):
                cls = _classes().get(found[1])
                if cls is not None:
                    return _parse(cls, line[found.end() :])
        return None


def error_codes() -> dict[str, type[AqueduckError]]:
    """Every code and its class."""
    return dict(_classes())


def _classes() -> dict[str, type[AqueduckError]]:
    found: dict[str, type[AqueduckError]] = {}
    todo: list[type[AqueduckError]] = [AqueduckError]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        if "code" in vars(cls):
            found[cls.code] = cls
    return found


def _parse(cls: type[AqueduckError], body: str) -> AqueduckError:
    text, _, hint = _SQLSTATE.sub("", body).partition(_FIX)
    message, table = _cut(_TABLE, text.rstrip())
    message, offset = _cut(_OFFSET, message)
    at = None if offset is None else int(offset)
    return cls(message, hint=hint.strip() or None, table=table, offset=at)


def _cut(pattern: re.Pattern[str], text: str) -> tuple[str, str | None]:
    found = pattern.search(text)
    return (text[: found.start()], found[1]) if found else (text, None)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _rebuild(cls: type[AqueduckError], message: str, keywords: dict[str, Any]) -> AqueduckError:
    return cls(message, **keywords)


def own_error(exc: BaseException) -> AqueduckError:
    """The error itself if it is ours; otherwise its type and place, and the system's reason: the message could contain anything."""
    if isinstance(exc, AqueduckError):
        return exc
    frames = traceback.extract_tb(exc.__traceback__)
    place = (
        f" in {frames[-1].name} (line {frames[-1].lineno} of {frames[-1].filename.rpartition('/')[2]})"
        if frames
        else ""
    )
    if isinstance(exc, OSError) and exc.errno is not None:
        hint = "look at the disk, the rights and the network of this machine"
        return AqueduckError(f"{os.strerror(exc.errno).lower()}: {type(exc).__name__}{place}", hint=hint)
    return AqueduckError(f"{type(exc).__name__}{place}", hint="this is a bug; please report it")


def system_reason(exc: OSError) -> str:
    """The operating system's message, for the middle of a sentence; without the path that `exc` would show."""
    return (exc.strerror or "unknown reason").lower()
