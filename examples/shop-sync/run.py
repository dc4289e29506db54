"""Sync a small shop into a lake, change the shop, sync again, compare, and ask the lake a question."""

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
QUESTION = """
select c.country, count(*) as orders, sum(o.total) as revenue
from {lake}.main.orders o join {lake}.main.customers c on c.id = o.customer_id
group by all order by revenue desc"""


def aqueduck(*arguments: str) -> None:
    """Run a command as you would type it."""
    print("$ aqueduck", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "aqueduck.cli", *arguments], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shop-sync-") as place, EmbeddedPostgres() as server:
        os.chdir(shutil.copytree(HERE, place, dirs_exist_ok=True))
        os.environ["PG_DSN"] = server.dsn
        with psycopg.connect(server.dsn, autocommit=True) as shop:
            shop.execute(Path("shop.sql").read_bytes())
            aqueduck("check", "-c", "aqueduck.yaml")
            aqueduck("run", "-c", "aqueduck.yaml", "--once")  # the rows that are there
            shop.execute("update orders set total = total * 2 where customer_id = 7")
            shop.execute("delete from orders where id > 4900")
            shop.execute("alter table customers add column vip boolean not null default false")
            shop.execute("update customers set vip = true where id = 7")
            aqueduck("run", "-c", "aqueduck.yaml", "--once")  # what has changed since
        aqueduck("verify", "-c", "aqueduck.yaml", "--no-spark")
        with LakePool().use(LakePlace(catalog="sqlite:lake.sqlite", data_path=""), read_only=True) as lake:
            for country, orders, revenue in lake.execute(QUESTION.format(lake=lake.alias)):
                print(f"{country}: {orders} orders, {revenue}")
            [(vips,)] = lake.execute(f"select count(*) from {lake.alias}.main.customers where vip")
            print(f"{vips} customer is a VIP, in a column that the lake did not have at first")


if __name__ == "__main__":
    main()
