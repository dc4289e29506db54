"""
The fixes of `check` as a script for psql: statements that can be run as they are, everything else as comments.

A fix is text for people, such as `grant …; -- then restart the server`. Only statements at its beginning are
taken, and only complete ones that take nothing away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from aqueduck.service.check_server import CheckResult

__all__ = ["fix_script"]

_STATEMENT = re.compile(r"(alter|create|grant|select)\s")
_INCOMPLETE = re.compile(r"[<…]|\bdrop\b|pg_drop_")
_PIECES = re.compile(r"""(?:[^;'"]|'[^']*'|"[^"]*")+""")


def fix_script(results: Iterable[CheckResult]) -> str:
    """A script that fixes what failed, and what could be better; each statement comes once."""
    lines: list[str] = []
    seen: set[str] = set()
    for result in results:
        if result.fix or not result.ok:
            lines += ["", f"-- {'note' if result.ok else 'FAIL'} {result.name}: {result.detail}"]
            lines += [line for line in _lines(result.fix or "") if line not in seen]
            seen.update(lines)
    return "\n".join(lines or ["", "-- nothing to fix"]).lstrip("\n") + "\n"


def _lines(fix: str) -> Iterator[str]:
    """The statements at the beginning of a fix, and the rest as a comment."""
    rest = fix
    for piece in _PIECES.findall(fix):
        statement = piece.strip()
        if not _STATEMENT.match(statement) or _INCOMPLETE.search(statement):
            break
        yield f"{statement};"
        rest = rest.split(piece, 1)[1].removeprefix(";")
    if comment := rest.strip().removeprefix("-- "):
        yield f"-- {comment}"
