"""Keep every change of a table as a row of a log, and answer who did what, when, in which order."""

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
LOG = """
select _op, id, owner, balance, dense_rank() over (order by _commit_lsn) as transaction
from {lake}.main.accounts_log order by _commit_lsn, _seq"""


def aqueduck(*arguments: str) -> None:
    """Run a command as you would type it."""
    print("$ aqueduck", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "aqueduck.cli", *arguments], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="audit-log-") as place, EmbeddedPostgres() as server:
        os.chdir(shutil.copytree(HERE, place, dirs_exist_ok=True))
        os.environ["PG_DSN"] = server.dsn
        with psycopg.connect(server.dsn, autocommit=True) as bank:
            bank.execute(Path("accounts.sql").read_bytes())
            aqueduck("init", "-c", "aqueduck.yaml")  # from here on, every change is kept
            with bank.transaction():
                bank.execute("update accounts set balance = balance - 30 where id = 1")
                bank.execute("update accounts set balance = balance + 30 where id = 3")
            bank.execute("insert into accounts values (4, 'Edsger', 10)")
            bank.execute("delete from accounts where id = 2")
        aqueduck("run", "-c", "aqueduck.yaml", "--once")
        with LakePool().use(LakePlace(catalog="sqlite:lake.sqlite", data_path=""), read_only=True) as lake:
            for op, number, owner, balance, transaction in lake.execute(LOG.format(lake=lake.alias)):
                print(f"transaction {transaction}: {op} of account {number} ({owner}): {balance}")


if __name__ == "__main__":
    main()
