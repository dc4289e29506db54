"""
The code blocks of a document in their order, and a reader who does what they say.

A comment before a block says who runs it, if it is not a reader: `<!-- run by tests/… -->` names the test,
`<!-- not run: … -->` the reason why no test does.  The site does not show these comments.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import duckdb

from aqueduck.lake.session.engine import load_extension
from tests.fix_postgres import Database

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?: *<!-- (?P<mark>[^\n]*?) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
FILE = re.compile(r"`([\w.-]+\.(?:yaml|py))`:\n+\Z")
"""The end of a paragraph before the contents of a file."""
OF_A_LAKE = re.compile(r"\blake\b|ducklake|\.parquet")


@dataclass(frozen=True)
class Block:
    """A code block; `file` is the name that the paragraph before it gives, `mark` the comment."""

    language: str
    text: str
    mark: str = ""
    file: str = ""

    @property
    def lines(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [s for line in joined.splitlines() if (s := line.strip()) and not s.startswith("#")]


def blocks_of(path: Path) -> Iterator[Block]:
    """The blocks of a document, including those inside of lists, without their indentation."""
    text = path.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        content = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        name = FILE.search(text, 0, found.start())
        yield Block(found["language"], content, found["mark"] or "", name[1] if name else "")


@dataclass
class Reader:
    """Follows a document in a directory: writes its files, types its commands, sends its SQL, compares what it shows."""

    directory: Path
    db: Database | None = None
    instead: dict[str, str] = field(default_factory=dict)
    """What is written here in place of a text of the document."""
    shown: str = ""
    """What the last commands printed."""
    lake: duckdb.DuckDBPyConnection = field(default_factory=duckdb.connect)

    def __post_init__(self) -> None:
        commands = self.directory / "bin"
        commands.mkdir()
        for name, module in {"python": "", "aqueduck": "-m aqueduck.cli"}.items():
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (commands / name).chmod(0o755)
        extensions = self._home_with_extensions()
        for name in extensions:
            load_extension(self.lake, name)
        self.lake.execute("set file_search_path = ?", [str(self.directory)])

    def _home_with_extensions(self) -> tuple[str, ...]:
        """DuckDB's extensions where `install` would put them: a test downloads nothing."""
        [(platform,)] = self.lake.execute("pragma platform").fetchall()
        place = self.directory / "home" / ".duckdb" / "extensions" / f"v{duckdb.__version__}" / platform
        place.mkdir(parents=True)
        names = ("ducklake", "sqlite_scanner")
        for name in names:
            wheel = __import__(f"duckdb_extension_{name}").__path__[0]
            file = f"{name}.duckdb_extension"
            (place / file).symlink_to(Path(wheel) / "extensions" / f"v{duckdb.__version__}" / file)
        return names

    def follow(self, page: str) -> None:
        """Every block of a page that is not marked otherwise."""
        for block in blocks_of(ROOT / page):
            if not block.mark:
                text = block.text
                for written, here in self.instead.items():
                    text = text.replace(written, here)
                self.do(replace(block, text=text))

    def do(self, block: Block) -> None:
        match block.language:
            case "yaml" | "python" if block.file:
                (self.directory / block.file).write_text(block.text)
            case "python":
                (self.directory / "typed.py").write_text(block.text)
                self.type("python typed.py")
            case "sh":
                self.type(block.text)
            case "sql":
                self.ask(block.text)
            case "text":
                assert self.shown.endswith(block.text), self.shown

    def type(self, commands: str) -> None:
        """Run commands as a shell does, in the directory."""
        env = {
            **os.environ,
            "PATH": f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(self.directory / "home"),
            "PG_DSN": self.db.dsn if self.db else "",
        }
        done = subprocess.run(
            ["sh", "-ec", commands], cwd=self.directory, env=env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{commands}{done.stdout[-2000:]}{done.stderr[-4000:]}"
        self.shown = done.stdout

    def ask(self, sql: str) -> None:
        """Send statements to the lake or to the source, as they name it."""
        for statement in re.split(r";\s*(?:\n|\Z)", sql):
            if OF_A_LAKE.search(statement):
                self.lake.execute(
                    statement.replace("sqlite:lake.sqlite", f"sqlite:{self.directory}/lake.sqlite")
                )
            elif statement.strip():
                assert self.db is not None
                self.db.execute(statement)
