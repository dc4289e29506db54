"""The statements of the how-to guides do what the guides say, with the rights that the guides give."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from aqueduck.config.sync import SyncConfig, parse_config
from aqueduck.lake.session.engine import load_extension
from aqueduck.postgres.registry.registry import install
from aqueduck.sync.check import run_checks
from aqueduck.sync.prepare import prepare
from tests.docs.reader import ROOT, Reader, blocks_of
from tests.fix_postgres import Database
from tests.fix_s3 import S3

HOW_TO = ROOT / "docs" / "how-to"
SHOP = """
    create table orders (id int primary key, total numeric(10, 2));
    create table customers (id int primary key, email text, notes text);
    create table invoices (id int primary key)
"""


def statements(page: str, of: str = "sql") -> list[str]:
    """The blocks of a page that a test runs."""
    return [b.text for b in blocks_of(HOW_TO / page) if b.language == of and not b.mark.startswith("not run")]


@pytest.fixture
def shop(db: Database) -> Database:
    db.execute(SHOP)
    return db


def config_for(db: Database, directory: Path, text: str) -> SyncConfig:
    whole = (
        f"source: {{dsn_env: PG_DSN}}\nlake: {{catalog: sqlite:lake.sqlite, data_path: ./lake_data}}\n{text}"
    )
    return parse_config(whole, base_dir=directory, env={"PG_DSN": db.dsn_for("aqueduck")})


TABLES = "groups: [{name: default, tables: [{source: public.orders}, {source: public.customers}]}]"


@pytest.mark.parametrize("publication_by", ["aqueduck", "user"])
def test_the_rights_for_a_managed_server_are_enough(
    shop: Database, tmp_path: Path, publication_by: str
) -> None:
    """docs/how-to/managed-postgresql.md: with membership in the owner, or with a publication of the owner's."""
    role, member, publication, *replicate = statements("managed-postgresql.md")
    assert len(set(replicate)) == 1
    shop.execute(
        "create role shop_owner; alter table orders owner to shop_owner; alter table customers owner to shop_owner"
    )
    try:
        shop.execute(role.replace("database shop", f"database {shop.name}"))
        shop.execute(replicate[0])
        [own] = statements("managed-postgresql.md", "yaml")
        config = config_for(shop, tmp_path, own if publication_by == "user" else TABLES)
        assert [r for r in run_checks(config) if not r.ok], "one of the two ways is still to be gone"
        shop.execute(publication if publication_by == "user" else member)
        assert [(r.name, r.detail) for r in run_checks(config) if not r.ok] == []
        assert list(prepare(config))
    finally:
        drop_slots(shop)
        shop.execute("drop owned by aqueduck cascade; drop role aqueduck")
        shop.execute("drop owned by shop_owner cascade; drop role shop_owner")


def drop_slots(db: Database) -> None:
    db.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )


def test_uninstalling_leaves_nothing_behind(shop: Database, tmp_path: Path) -> None:
    """docs/how-to/uninstall.md: no slot, publication, schema or role, and a lake that others can read."""
    drop, look, role, lake = statements("uninstall.md")
    shop.execute("create role aqueduck superuser login replication")
    config = config_for(shop, tmp_path, TABLES)
    assert list(prepare(config))
    reader = Reader(tmp_path, shop)
    for block in (look, drop):
        reader.ask(block)
    shop.execute("alter role aqueduck nosuperuser")
    reader.ask(role)
    assert shop.query("select slot_name from pg_replication_slots where database = current_database()") == []
    assert shop.query("select pubname from pg_publication") == []
    assert shop.query("select from pg_namespace where nspname = 'aqueduck'") == []
    reader.ask(lake)
    schemas = reader.lake.execute(
        "select schema_name from duckdb_schemas() where database_name = 'lake'"
    ).fetchall()
    assert ("aqueduck",) not in schemas


def test_tables_are_added_and_watched_as_written(shop: Database) -> None:
    """The SQL of docs/how-to/add-a-table.md and docs/how-to/alerting.md, in its order."""
    with shop.connect() as conn:
        install(conn)
    shop.execute("select aqueduck.add_table('public.orders')")
    for page in ("add-a-table.md", "alerting.md"):
        for block in statements(page):
            shop.execute(block)
    assert shop.query("select source from aqueduck.tables() order by 1") == [
        ("public.customers",),
        ("public.orders",),
    ]


def marked(page: str, language: str) -> list[str]:
    """The blocks of a page whose comment names this file."""
    return [
        b.text
        for b in blocks_of(ROOT / "docs" / page)
        if b.mark.endswith(Path(__file__).name) and b.language == language
    ]


def test_columns_are_chosen_as_written(shop: Database) -> None:
    """The SQL of docs/columns.md: a projection, a replica identity, a publication of your own."""
    with shop.connect() as conn:
        install(conn)
    shop.execute("alter table customers add country text not null default 'DE', add name text")
    add, identity, publication = marked("columns.md", "sql")
    for statement in (add, identity, publication):
        shop.execute(statement)
    assert shop.query("select source from aqueduck.tables()") == [("public.customers",)]


def test_the_role_of_the_capture_page_may_read(shop: Database) -> None:
    """docs/capture.md: the role may replicate, and may read the table that it was granted."""
    [statements] = marked("capture.md", "sql")
    try:
        shop.execute(statements.replace("database shop", f"database {shop.name}"))
        with shop.connect("aqueduck") as conn:
            assert conn.execute("select count(*) from orders").fetchone() == (0,)
            assert conn.execute(
                "select rolreplication from pg_roles where rolname = current_user"
            ).fetchone() == (True,)
    finally:
        shop.execute("drop owned by aqueduck cascade; drop role aqueduck")


def test_a_token_is_made_as_written(tmp_path: Path) -> None:
    """docs/operations-http.md and docs/how-to/alerting.md: 64 characters, which the server takes."""
    reader = Reader(tmp_path)
    [export] = marked("operations-http.md", "sh")
    reader.type(f"{export}echo $AQUEDUCK_TOKEN")
    assert re.fullmatch(r"[0-9a-f]{64}\n", reader.shown)
    [command] = statements("alerting.md", "sh")
    reader.type(command)
    assert re.fullmatch(r"[0-9a-f]{64}\n", reader.shown)


def test_every_alert_that_is_named_exists() -> None:
    """A reader finds each alert of docs/how-to/alerting.md among the rules."""
    named = set(re.findall(r"`(Aqueduck\w+)`", (HOW_TO / "alerting.md").read_text(encoding="utf-8")))
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
    assert len(named) > 8
    assert named <= set(re.findall(r"alert: (\w+)", rules))


def test_a_lake_in_an_object_store_is_read_as_written(s3: S3, tmp_path: Path) -> None:
    """The secret of docs/how-to/object-storage.md opens a lake whose files are in a store with the S3 interface."""
    [block] = statements("object-storage.md")
    con = duckdb.connect()
    for name in ("ducklake", "sqlite_scanner", "httpfs"):
        load_extension(con, name)
    here = {
        "127.0.0.1:9000": s3.address,
        "'lake', secret": f"'{s3.env['S3_ACCESS_KEY_ID']}', secret",
        "choose-one-longer": s3.env["S3_SECRET_ACCESS_KEY"],
        "lake.sqlite": f"{tmp_path}/lake.sqlite",
    }
    for written, ours in here.items():
        assert written in block
        block = block.replace(written, ours)
    secret, attach, count = (part for part in block.split(";\n") if part.strip())
    s3.client.create_bucket(Bucket="lake")
    con.execute(secret)
    con.execute(f"attach 'ducklake:sqlite:{tmp_path}/lake.sqlite' as filled (data_path 's3://lake/shop/')")
    con.execute("create table filled.orders as select 1 as id; detach filled")
    con.execute(attach)
    assert con.execute(count).fetchall() == [(1,)]
