"""The command line in this process, as tests of it type it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from aqueduck.cli import commands as cli


class Cli:
    """Runs commands in this process; remembers what they printed."""

    def __init__(
        self, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.directory = directory
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def config(self, dsn: str, *tables: str, **changes: Any) -> Path:
        content = {
            "source": {"dsn": dsn},
            "lake": {"catalog": "sqlite:lake.sqlite", "data_path": "data"},
            "groups": [{"name": "test", "tables": [{"source": t} for t in tables]}],
            **changes,
        }
        file = self.directory / "aqueduck.yaml"
        file.write_text(json.dumps(content))
        return file

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["aqueduck", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = self._capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    def fails(self, *arguments: str | Path) -> tuple[int, str]:
        code, _, error = self(*arguments)
        assert code != 0
        lines = [line for line in error.splitlines() if "[warning  ]" not in line]
        assert len(lines) == 1, f"one line, not: {error}"
        return code, lines[0]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    yield Cli(tmp_path, capsys, monkeypatch)
    structlog.reset_defaults()
