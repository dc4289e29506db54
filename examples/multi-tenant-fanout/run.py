"""From one PostgreSQL table to one lake for all, and from there to a lake for each tenant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg

from aqueduck.config.lake_place import LakePlace
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.pool import LakePool

HERE = Path(__file__).parent
TENANTS = ("quacksworth", "mallardine", "tealman")


def aqueduck(*arguments: str) -> None:
    """Run a command as you would type it."""
    print("$ aqueduck", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "aqueduck.cli", *arguments], check=True)


def count(tenant: str) -> None:
    with LakePool().use(LakePlace(catalog=f"sqlite:{tenant}.sqlite", data_path=""), read_only=True) as lake:
        [(rows, own)] = lake.execute(
            f"select count(*), count(*) filter (company = '{tenant}') from {lake.alias}.main.events"
        )
    print(f"{tenant}: {rows} rows, {own} of them its own")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fanout-") as place, EmbeddedPostgres() as server:
        os.chdir(shutil.copytree(HERE, place, dirs_exist_ok=True))
        os.environ["PG_DSN"] = server.dsn
        with psycopg.connect(server.dsn, autocommit=True) as source:
            source.execute(Path("events.sql").read_bytes())
            aqueduck("run", "-c", "sync.yaml", "--once")
            aqueduck("run", "-c", "fanout.yaml", "--once")  # makes the lakes and fills them
            source.execute("update events set company = 'tealman' where event_id <= 30")  # tenants that move
            source.execute("delete from events where event_id > 870")
            aqueduck("run", "-c", "sync.yaml", "--once")
            aqueduck("run", "-c", "fanout.yaml", "--once")  # applies what has changed
        aqueduck("verify", "-c", "fanout.yaml")
        for tenant in TENANTS:
            count(tenant)


if __name__ == "__main__":
    main()
