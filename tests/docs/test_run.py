"""
Every command line of the documents is run, its placeholders filled in, on a small shop that goes through all three flows.

That they are spelled right is in tests/docs/test_docs.py; here they have to do their work.  A command that the tour does not know
how to fill in fails it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest

from aqueduck.lake.session.engine import load_extension
from tests.docs.test_docs import blocks, command_lines
from tests.fix_postgres import Database, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1800)]

# In this order what a command needs is there when its turn comes.
ORDER = (
    "--version", "init", "check", "run --once", "tables", "run", "status", "verify", "asof", "maintain", "slots", "tail",
    "bench",
)  # fmt: skip
ELSEWHERE = {
    "demo",
    "test_decoding",
    "new",
    "uninstall",
    "--watch",
    "--install-completion",
    "--show-completion",
}
"""
Run by tests/test_dist.py, from an installed wheel, by tests/postgres/decode/test_text_rows.py, on a server that has the
plugin, by tests/sync/setup and by tests/cli/test_watching.py.
"""
WITHOUT_FILE = {"--version", "slots", "tail", "bench"}
SHOP = """
    create table orders (id bigint generated always as identity primary key, country text, total numeric(10, 2));
    create table customers (id int primary key, name text, email text, phone text, notes text, country text);
    create table audit (id int, what text);
    create table invoices (id int primary key);
    insert into orders (country, total) select case when n % 2 = 0 then 'DE' else 'FR' end, n from generate_series(1, 50) n;
    insert into customers values (1, 'Ada', 'ada@example.org', '+49', 'vip', 'DE')
"""


@dataclass
class Tour:
    """The shop's database, the three files, and a lake that the fan-out reads."""

    db: Database
    directory: Path

    def write_files(self) -> None:
        lake = {"catalog": f"sqlite:{self.directory}/lake.sqlite", "data_path": f"{self.directory}/data"}
        server = {"server": {"port": 0}}
        self.write("aqueduck.yaml", {
            "source": {"dsn_env": "PG_DSN"}, "lake": lake, "mask_salt_env": "LAKE_SALT",
            "state_dir": f"{self.directory}/state",
            "groups": [{"name": "default", "flush_interval_ms": 200, "tables": [{"source": "public.orders"}]}], **server,
        })  # fmt: skip
        events: dict[str, object] = {
            "source": {"type": "postgres-cdc", "config": {
                "connection_url": self.db.dsn, "slot_name": "faucet", "publication_name": "faucet", "create_slot_if_missing": True,
            }},
            "sink": {"type": "jsonl", "config": {"path": f"{self.directory}/events.jsonl"}},
            "state": {"type": "file", "config": {"path": f"{self.directory}/bookmark"}},
        }  # fmt: skip
        self.write("faucet.yaml", events)
        self.write("events.yaml", events)
        fanout = {
            "source": {**lake, "table": "orders"},
            "routing": {"field": "country", "key_columns": ["id"]},
            "destinations": [
                {
                    "id": f"tenant-{value}", "routing_value": value,
                    "catalog": f"sqlite:{self.directory}/{value}.sqlite", "data_path": f"{self.directory}/{value}/",
                }
                for value in ("DE", "FR")
            ],
            "state_dir": f"{self.directory}/fanout-state", **server,
        }  # fmt: skip
        self.write("viaduck.yaml", fanout)
        self.write("fanout.yaml", fanout)

    def write(self, name: str, document: dict[str, object]) -> None:
        (self.directory / name).write_text(json.dumps(document))

    # -- commands

    def fill(self, line: str) -> list[str]:
        """The words of a command line, with values for what the documents leave open."""
        text = re.sub(r"\]…?|\[", " ", line)
        text = re.sub(r"\bFILE\b", "aqueduck.yaml", text)
        for name, value in {
            "TABLE": "public.orders",
            "NAME": "decoded",
            "SECONDS": "60",
            "--tables N": "--tables 3",
            "--destination ID": "--destination tenant-DE",
            "--dsn …": f"--dsn {shlex.quote(self.db.dsn)}",
            "--table …": "--table public.orders",
            "now|slot|LSN": "now",
            "public.tickets": "public.orders",
            "2026-05-01T12:00:00Z": "NOW",
            "0/1A2B3C4": "HERE",
        }.items():  # fmt: skip
            text = text.replace(name, str(value))
        words = shlex.split(text)[1:]
        if words[0] == "asof" and not {"--lsn", "--time"} & set(words):
            words += ["--lsn", "HERE"]
        if words == ["tables"]:
            words += ["remove", "public.audit"]
        if words in (["tables", "add"], ["tables", "remove"]):
            words += ["public.invoices"]
        if words == ["bench"]:
            words += ["drain"]
        if words[0] == "bench":
            words += ["--rows", "4" if "tenants" in words else "2000", "--json"]  # of tenants: destinations
        if words[0] not in WITHOUT_FILE and "-c" not in words:
            words += ["-c", "aqueduck.yaml"]
        return words

    def run(self, words: list[str]) -> str:
        """Run to its end, or, where it has none, until it works and is asked to stop."""
        words = [{"NOW": self.now(), "HERE": self.here()}.get(word, word) for word in words]
        endless = words[0] == "tail" or (words[0] == "run" and "--once" not in words)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PG_DSN": self.db.dsn,
            "LAKE_SALT": "grains",
        }
        out = self.directory / "out.txt"
        with open(out, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "aqueduck.cli", *words], cwd=self.directory, env=env, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            if endless:
                wait_until(
                    lambda: process.poll() is not None or self.works(words, out),
                    " ".join(words),
                    240,
                    log=out.read_text,
                )
                assert process.poll() is None, out.read_text()[-3000:]
                os.kill(process.pid, signal.SIGINT)
            process.wait(timeout=400)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, (
            f"{' '.join(words)}: exit {process.returncode}\n{out.read_text()[-3000:]}"
        )
        return out.read_text()

    def now(self) -> str:
        return str(
            self.db.value("select to_char(now() at time zone 'utc', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')")
        )

    def here(self) -> str:
        return str(self.db.value("select pg_current_wal_lsn()::text"))

    def works(self, words: list[str], out: Path) -> bool:
        if words[0] == "tail":
            self.db.execute("insert into orders (country, total) values ('DE', 7)")
            return "orders" in out.read_text()
        return "serving" in out.read_text()


def choices(line: str) -> list[str]:
    """`drain|mixed --capture stream|poll` is two commands: each choice comes at least once."""
    found = re.findall(r"(?<=\s)[\w-]+(?:\|[\w-]+)+", line)
    found = [choice for choice in found if choice != "now|slot|LSN"]
    rounds = max([len(choice.split("|")) for choice in found], default=1)
    lines = []
    for number in range(rounds):
        filled = line
        for choice in found:
            parts = choice.split("|")
            filled = filled.replace(choice, parts[number % len(parts)], 1)
        lines.append(filled)
    return lines


def rank(words: list[str]) -> tuple[bool, int]:
    """Commands of a fan-out run after the lake that it reads exists."""
    name = "run --once" if words[0] == "run" and "--once" in words else words[0]
    return bool({"viaduck.yaml", "fanout.yaml"} & set(words)), ORDER.index(name)


@pytest.fixture
def tour(db: Database, tmp_path: Path) -> Tour:
    db.execute(SHOP)
    db.execute("create publication faucet for table orders")
    made = Tour(db, tmp_path)
    made.write_files()
    return made


def test_every_command_of_the_documents_works(tour: Tour) -> None:
    """Each command exits with 0, from `init` to `verify`, and the lake answers the SQL of the documents."""
    lines = {line for _, line in command_lines()}
    commands = {
        tuple(tour.fill(one)) for line in lines for one in choices(line) if not ELSEWHERE & set(one.split())
    }
    for words in sorted(map(list, commands), key=lambda words: (rank(words), words)):
        print(*words, flush=True)
        if words[0] == "verify":  # tables that were added since are copied first
            tour.run(["run", "-c", "aqueduck.yaml", "--once"])
        tour.run(words)
        if words == ["run", "-c", "aqueduck.yaml", "--once"]:  # first a copy, then a batch
            tour.db.execute("insert into orders (country, total) values ('FR', 8)")
            tour.run(words)
    con = duckdb.connect()
    load_extension(con, "ducklake")
    load_extension(con, "sqlite_scanner")
    con.execute(
        f"attach 'ducklake:sqlite:{tour.directory}/lake.sqlite' as lake (data_path '{tour.directory}/data')"
    )
    con.execute(f"attach 'ducklake:sqlite:{tour.directory}/DE.sqlite' as tenant")
    newest = con.execute("select max(snapshot_id) from ducklake_snapshots('lake')").fetchall()[0][0]
    asked = itertools.chain(statements("docs/time-travel.md"), statements("docs/fanout.md"))
    answers = [
        con.execute(
            sql.replace("42", str(newest)).replace("lake.aqueduck.fanout", "tenant.aqueduck.fanout")
        ).fetchall()
        for sql in asked
    ]
    assert len(answers) == 3
    assert all(answers)
    for sql in statements("docs/operations.md"):
        if "pg_create_logical" not in sql:  # by hand, after a failover
            tour.db.execute(sql)


def statements(document: str) -> list[str]:
    found = [block for name, block in blocks("sql") if name.startswith(f"{document}-")]
    assert found, document
    return [part.strip() for block in found for part in block.split(";\n") if part.strip()]


def test_choices_are_all_taken() -> None:
    """The tour itself: nothing that the documents offer is left out."""
    assert choices("aqueduck bench drain|mixed|big --capture stream|poll") == [
        "aqueduck bench drain --capture stream", "aqueduck bench mixed --capture poll", "aqueduck bench big --capture stream",
    ]  # fmt: skip
