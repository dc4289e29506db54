"""`status --watch` shows the state again and again, also while the server is away."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aqueduck.cli.watching import keep_showing
from aqueduck.model.errors import ConfigError, SourceUnreachableError
from tests.cli.conftest import Cli
from tests.fix_postgres import Database


def test_the_state_is_shown_until_it_is_interrupted(db: Database, run: Cli, tmp_path: Path) -> None:
    """With --json, one line a look; a change is in a later one."""
    db.execute("create table t (id int primary key)")
    config = run.config(db.dsn, "public.t")
    assert run("init", "-c", config)[0] == 0
    words = [sys.executable, "-m", "aqueduck.cli", "status", "--watch", "--interval", "0.1", "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    # A background job of a shell ignores SIGINT, and its children do too.
    with subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:  # fmt: skip
        try:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())[0]["enabled"] is True
            db.execute("select aqueduck.disable_table('t')")
            assert any(json.loads(line)[0]["enabled"] is False for line in watching.stdout)
            watching.send_signal(signal.SIGINT)
            watching.stdout.read()
            assert watching.wait(timeout=60) == 130
        finally:
            watching.kill()


def watched(*answers: Any, terminal: bool = False) -> str:
    """What is printed for these answers, until there are no more."""
    out = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
    left = iter(answers)

    def read() -> Any:
        answer = next(left, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with pytest.raises(KeyboardInterrupt):
        keep_showing(out, read, out.print, 0.001)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_an_error_that_may_pass_is_shown_in_its_place() -> None:
    """The server restarts: the next look shows the state again."""
    assert watched("one", SourceUnreachableError("away"), "two") == "one\n[pg.unreachable] away\ntwo\n"


def test_an_error_that_does_not_pass_ends_it() -> None:
    """Nothing changes until a person acts."""
    with pytest.raises(ConfigError):
        watched(ConfigError("no such key"))


def test_a_terminal_is_cleared() -> None:
    """Each look takes the place of the one before."""
    assert watched("one", "two", terminal=True).count("\x1b[2J") == 2


def test_the_shell_completes_commands_tables_and_groups(
    db: Database, run: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables to add are those of the database, the others those of the registry."""
    db.execute("create table orders (id int primary key); create table other (id int primary key)")
    config = run.config(db.dsn, "public.orders")
    assert run("init", "-c", config)[0] == 0

    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_AQUEDUCK_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return run()[1].split()

    assert completed("aqueduck ta") == ["tail", "tables"]
    assert completed(f"aqueduck tables retry -c {config} public.o") == ["public.orders"]
    assert completed(f"aqueduck tables add -c {config} public.o") == ["public.other"]
    assert completed(f"aqueduck groups enable -c {config} t") == ["test"]
    assert completed(f"aqueduck settings get -c {config} inline") == ["inline_rows"]
    config = run.config("host=127.0.0.1 port=1 dbname=x", "public.orders")
    assert completed(f"aqueduck tables retry -c {config} public.o") == []
