"""The server of demo and benchmarks belongs to the user who started it."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest

from aqueduck.lab.lab_server import lab_server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o711)  # the server may run as another user
    return tmp_path


def test_other_users_cannot_connect(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: `trust` on loopback let any user of the machine run programs as the server's user."""
    with lab_server(directory) as server:
        file = Path(os.environ["PGPASSFILE"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        password = file.read_text().strip().rpartition(":")[2]
        assert password not in server.dsn
        with psycopg.connect(server.dsn) as conn:  # as this process and its children do
            assert conn.execute("select 1").fetchone() == (1,)
        done = subprocess.run(
            [server.bin("psql"), "-d", server.dsn, "-Atc", "select 1"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "1\n", done.stderr
        with monkeypatch.context() as stranger:  # undone here, so that the server's file does not outlive it
            stranger.setenv("PGPASSFILE", "/dev/null")
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(server.dsn)
            assert server.socket_dir is not None
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(server.dsn, host=str(server.socket_dir))


def test_the_environment_is_as_before_afterwards(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the user's own comes back."""
    monkeypatch.setenv("PGPASSFILE", "/somewhere/of/mine")
    with lab_server(directory):
        assert os.environ["PGPASSFILE"] != "/somewhere/of/mine"
    assert os.environ["PGPASSFILE"] == "/somewhere/of/mine"
