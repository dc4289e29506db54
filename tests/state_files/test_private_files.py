"""Cell values that lie in files are for the service's user alone."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aqueduck.lake.session.engine import new_connection
from aqueduck.model.errors import ConfigError
from aqueduck.state_files.private_files import private_directory, restrict_new_files
from tests.fix_postgres import Database


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_the_command_line_makes_is_private(db: Database, tmp_path: Path) -> None:
    """The attack: another user of the machine read stages, spills, sinks and lakes, columns with masks among them."""
    db.execute("create table t (id int primary key)")
    made = tmp_path / "made"
    config = {
        "source": {"dsn": db.dsn},
        "lake": {"catalog": f"sqlite:{made}/lake.sqlite", "data_path": f"{made}/data"},
        "groups": [{"name": "test", "tables": [{"source": "public.t"}]}],
        "state_dir": f"{made}/state",
    }
    file = tmp_path / "aqueduck.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "aqueduck.cli", "init", "-c", str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("AQUEDUCK_UMASK", None)
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    found = [made, *made.rglob("*")]
    assert len(found) >= 3
    assert {path.name: oct(mode(path)) for path in found if mode(path) & 0o077} == {}


def test_another_mask_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lake on local disk that a group reads needs a wider mask."""
    before = os.umask(0o022)
    try:
        restrict_new_files({"AQUEDUCK_UMASK": "027"})
        assert os.umask(0o022) == 0o027
        restrict_new_files({})
        assert os.umask(0o022) == 0o077
    finally:
        os.umask(before)


@pytest.mark.parametrize("text", ["", "private", "0999", "700", "1777", "-1"])
def test_a_mask_that_makes_no_sense_is_refused(text: str) -> None:
    """Neither garbage nor a mask that keeps the owner from the files."""
    with pytest.raises(ConfigError, match="AQUEDUCK_UMASK"):
        restrict_new_files({"AQUEDUCK_UMASK": text})


def test_a_directory_that_was_open_is_closed(tmp_path: Path) -> None:
    """Directories of earlier versions could be read by everybody."""
    place = tmp_path / "state"
    place.mkdir()
    place.chmod(0o755)
    assert mode(private_directory(place)) == 0o700
    assert mode(private_directory(tmp_path / "new" / "state")) == 0o700


def test_a_link_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    """The attack: a user who created the predictable path first chose where spilled rows were written."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "spill").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="a link or belongs to another user"):
        private_directory(tmp_path / "spill")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """A directory that its owner can read is no place for our data."""
    place = tmp_path / "theirs"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        private_directory(place)


def test_spilled_rows_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a query spills lies in a directory of this user alone, and is gone afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    con = new_connection(threads=1, memory_limit="60MB")
    [[spill]] = con.execute("select current_setting('temp_directory')").fetchall()
    home = Path(spill).parent
    assert (mode(home), home.lstat().st_uid) == (0o700, os.geteuid())
    con.execute("create table t as select i, md5(i::varchar) as v from range(2000000) r(i)")
    assert Path(spill).exists(), "nothing was spilled"
    con.close()
    assert not Path(spill).exists()


SPILLS = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from aqueduck.lake.session.engine import new_connection
con = new_connection(threads=1, memory_limit="60MB")
if len(sys.argv) > 2:
    con.execute("create table t as select i, md5(i::varchar) as v from range(2000000) r(i)")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_spilled_rows_of_a_killed_process_go_with_the_next_start(tmp_path: Path) -> None:
    """The attack: rows that a query had spilled stayed on disk for ever after a kill -9."""
    for stranger in (f"aqueduck-{os.geteuid()}", "aqueduck-taken"):
        (tmp_path / stranger).symlink_to(
            "/dev/null"
        )  # names that others took in advance keep nobody from starting
    killed = subprocess.run([sys.executable, "-c", SPILLS, str(tmp_path), "and dies"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("aqueduck-*/spill-*/*"))
    subprocess.run([sys.executable, "-c", SPILLS, str(tmp_path)], check=True)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
