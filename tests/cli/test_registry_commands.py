"""Everything that SQL can do with the registry, the command line can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.fix_postgres import Database

LISTED = {"groups", "list_settings", "status", "tables"}
"""Functions that return rows: `groups list`, `settings list`, `status` and `tables list`."""


@pytest.fixture
def shop(db: Database, run: Cli) -> Path:
    """The configuration of a group `test` with the table `t`; the table `later` is not replicated."""
    db.execute("create table t (id int primary key); create table later (id int primary key)")
    config = run.config(db.dsn, "public.t")
    assert run("init", "-c", config)[0] == 0
    return config


def called(run: Cli, config: Path, *words: str) -> dict[str, Any]:
    code, out, error = run(*words, "-c", config, "--json")
    assert code == 0, error
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_every_function_of_the_sql_api_has_its_command(db: Database, shop: Path, run: Cli) -> None:
    """With each of its arguments: nobody needs psql to operate a service."""
    commands = (
        ("tables", "disable", "t"),
        ("tables", "enable", "t"),
        ("tables", "resync", "t", "--group", "test"),
        ("tables", "retry", "t"),
        ("tables", "add", "later", "--group", "test"),
        ("tables", "remove", "later"),
        (
            "groups",
            "create",
            "other",
            "--slot",
            "o",
            "--publication",
            "o",
            "--capture",
            "poll",
            "--lake",
            "l",
        ),
        ("groups", "disable", "other"),
        ("groups", "enable", "other"),
        ("groups", "release", "other"),
        ("tables", "move", "t", "other", "--from", "test"),
        ("groups", "drop", "other", "--with-tables"),
        ("settings", "set", "inline_rows", "7"),
        ("settings", "get", "inline_rows"),
    )
    answers = [called(run, shop, *words) for words in commands]
    given = {answer["called"]: answer.keys() - {"called", "result"} for answer in answers}
    functions = db.query(
        "select proname::text, coalesce(proargnames[:pronargs], '{}') from pg_proc"
        " where pronamespace = 'aqueduck'::regnamespace and proname not like '\\_%'"
    )
    assert {name: set(arguments) for name, arguments in functions if name not in LISTED} == given
    assert {name for name, _ in functions if name not in given} == LISTED


def test_a_table_is_paused_and_resumed(db: Database, shop: Path, run: Cli) -> None:
    """The registry contains the change that the command reports."""
    assert run("tables", "disable", "t", "-c", shop)[1] == "changes of t are parked until it is enabled\n"
    assert db.value("select enabled from aqueduck.tables()") is False
    assert run("tables", "enable", "t", "-c", shop)[0] == 0
    assert db.value("select enabled from aqueduck.tables()") is True


def test_a_group_is_released_from_its_lake(db: Database, shop: Path, run: Cli) -> None:
    """The next service may take it."""
    assert db.value("select lake from aqueduck.groups()") is not None
    assert run("groups", "release", "test", "-c", shop)[0] == 0
    assert db.value("select lake from aqueduck.groups()") is None


def test_a_change_that_the_file_undoes_says_so(shop: Path, run: Cli) -> None:
    """A notice of the registry's function is on stderr, so that JSON stays JSON."""
    code, out, error = run("groups", "drop", "test", "--with-tables", "-c", shop, "--json")
    assert (code, json.loads(out)["called"]) == (0, "drop_group")
    assert error == (
        "note: the group test is in the configuration file: change that too, or the next start undoes this\n"
    )


def test_a_group_with_tables_is_kept(shop: Path, run: Cli) -> None:
    """The hint of the function follows its refusal."""
    code, error = run.fails("groups", "drop", "test", "-c", shop)
    assert code == 2
    assert "the group test has 1 tables. Fix: move or remove them first" in error


def test_the_file_of_this_directory_is_the_default(
    shop: Path, run: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without -c, every command reads ./aqueduck.yaml."""
    monkeypatch.chdir(shop.parent)
    assert "public.t" in run("tables", "list")[1]
    assert "public.t" in run("status")[1]


def test_a_missing_default_file_says_how_to_get_one(
    tmp_path: Path, run: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with both ways on."""
    monkeypatch.chdir(tmp_path)
    code, error = run.fails("check")
    assert code == 2
    assert "there is no aqueduck.yaml in this directory. Fix: name the file with -c FILE" in error


def test_a_misspelled_name_gets_the_one_that_was_meant(shop: Path, run: Cli) -> None:
    """By the functions of the registry, so that psql and the API say it too."""
    for words, hint in (
        (("tables", "add", "publik.later", "--group", "test"), "did you mean public.later?"),
        (("tables", "add", "latr", "--group", "test"), "did you mean public.later?"),
        (("tables", "add", "later", "--group", "tset"), "did you mean test?"),
        (("tables", "add", "zzz", "--group", "test"), "correct the name, or create the table"),
        (("tables", "resync", "tt"), "did you mean public.t?"),
        (("tables", "resync", "zzz"), "select source from aqueduck.tables() lists what is"),
    ):
        assert f". Fix: {hint}" in run.fails(*words, "-c", shop)[1]


def test_a_misspelled_table_of_the_file_gets_the_one_that_was_meant(db: Database, run: Cli) -> None:
    """`check` and `init` need no registry for that; a name with capitals is quoted."""
    db.execute('create table orders (id int primary key); create table "Customers" (id int primary key)')
    config = run.config(db.dsn, "public.ordrs", "public.customers")
    findings = json.loads(run("check", "-c", config, "--json")[1])
    fixes = {f["name"]: f["fix"] for f in findings if f["name"].startswith("table ")}
    assert fixes["table public.ordrs"].startswith("did you mean public.orders?")
    assert fixes["table public.customers"].startswith('did you mean public."Customers"?')
