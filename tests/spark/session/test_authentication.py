"""Spark answers only its own processes, and does not reveal how it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aqueduck.model.errors import ConfigError
from aqueduck.spark.session.authentication import authentication, open_to_strangers, unsecret
from aqueduck.spark.session.session import session_settings

ATTACK = """
import contextlib, os, stat, sys
from pathlib import Path
import psutil
from aqueduck.state_files.private_files import restrict_new_files
from aqueduck.spark.session.session import build_session
from tests.stranger import RefusedError, fetch_block, listening_ports

restrict_new_files({})
conf = {"spark.broadcast.compress": "false", "spark.executorEnv.PG_DSN": "password=executors-planted",
        "spark.hadoop.fs.s3a.secret.key": "hadoop-planted"}

def attacked(authenticate):
    spark = build_session("local[1]", {**conf, **authenticate}, "test", driver_memory="512m")
    kept = spark.sparkContext.broadcast("broadcast-planted")
    spark.sparkContext.parallelize([1], 1).map(lambda _: kept.value).collect()
    answered, refused = [], 0
    for port in sorted(listening_ports(os.getpid())):
        try:
            answered.append(fetch_block(port, f"broadcast_{kept._jbroadcast.id()}_piece0"))
        except RefusedError:
            refused += 1
    return spark, answered, refused

spark, answered, refused = attacked({"spark.authenticate": "false"})
print("open:", len(answered))
spark.stop()
spark, answered, refused = attacked({})
print("answered:", len(answered), "refused:", refused > 1)
command_lines = []
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    with contextlib.suppress(psutil.Error):  # a worker that has just ended has none
        command_lines += process.cmdline()
print("on a command line:", any("-planted" in part for part in command_lines), len(command_lines) > 10)
sockets = Path(spark.conf.get("spark.python.unix.domain.socket.dir"))
print(oct(stat.S_IMODE(sockets.stat().st_mode)), len([f for f in sockets.iterdir() if f.is_socket()]) > 0)
print(sockets)
"""


@pytest.mark.spark
def test_a_stranger_gets_no_block(tmp_path: Path) -> None:
    """Another user of the host, who can fetch a broadcast where Spark does not authenticate, is refused by default."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    script = tmp_path / "attack.py"
    script.write_text(ATTACK)
    found = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    _, *lines, sockets = found.stdout.splitlines()  # first comes the reminder
    assert lines == [
        "open: 1",
        "answered: 0 refused: True",
        "on a command line: False True",
        "0o700 True",
    ], found.stdout + found.stderr
    assert not Path(sockets).exists()


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "yarn", "k8s://https://host", "local-cluster[2,1,1024]"]
)
def test_every_master_authenticates(master: str) -> None:
    """Where Spark makes the secret, or we do, nothing has to be set."""
    assert session_settings(master, {}, "2g")["spark.authenticate"] == "true"
    assert open_to_strangers(master, {}) is None


@pytest.mark.parametrize(
    ("master", "encrypted"), [("local[2]", None), ("yarn", "true"), ("k8s://host", "true")]
)
def test_what_travels_between_hosts_is_encrypted(master: str, encrypted: str | None) -> None:
    """A network has listeners, loopback has none."""
    assert authentication(master, {}).get("spark.network.crypto.enabled") == encrypted


def test_a_standalone_cluster_authenticates_with_its_secret(tmp_path: Path) -> None:
    """It is read from a file, and is never where Spark's launcher shows it."""
    secret = tmp_path / "secret"
    secret.write_text("cluster-planted\n")
    settings = session_settings("spark://h:7077", {"spark.authenticate.secret.file": str(secret)}, "2g")
    assert settings["spark.authenticate.secret"] == "cluster-planted"
    assert settings["spark.network.crypto.enabled"] == "true"
    assert "planted" not in str(unsecret(settings))


def test_a_standalone_cluster_without_a_secret_says_what_is_missing() -> None:
    """The service starts as before, and the hint names the key."""
    assert "spark.authenticate" not in session_settings("spark://h:7077", {}, "2g")
    assert "spark.authenticate.secret.file" in (open_to_strangers("spark://h:7077", {}) or "")


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    """It would let everyone in."""
    (tmp_path / "secret").touch()
    with pytest.raises(ConfigError, match="is empty"):
        authentication("spark://h:7077", {"spark.authenticate.secret.file": str(tmp_path / "secret")})


def test_a_persons_choice_wins() -> None:
    """Authentication can be turned off, with a warning in the log."""
    conf = {"spark.authenticate": "false"}
    assert session_settings("local[2]", conf, "2g")["spark.authenticate"] == "false"
    assert open_to_strangers("local[2]", conf) == "remove spark.authenticate from spark.conf"


def test_the_launcher_gets_no_secret() -> None:
    """Its command line shows only what the launcher itself needs."""
    settings = {
        "spark.driver.memory": "2g",
        "spark.driver.password": "x",
        "spark.executorEnv.PG_DSN": "x",
        "spark.hadoop.fs.s3a.secret.key": "x",
        "spark.sql.catalog.c.url": "jdbc:postgresql://h/d?password=x",
    }
    assert unsecret(settings) == {"spark.driver.memory": "2g"}
