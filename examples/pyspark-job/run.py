"""Run job.py twice on an embedded PostgreSQL: it continues where it stopped, and no order is counted twice."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg

from aqueduck.config.lake_place import LakePlace
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.pool import LakePool
from aqueduck.spark.session.session import prepare_environment

HERE = Path(__file__).parent
ORDERS = "insert into orders select g, 1 + g % 30, g from generate_series({}, {}) g"


def aqueduck(*arguments: str) -> None:
    """Run a command as you would type it."""
    subprocess.run([sys.executable, "-m", "aqueduck.cli", *arguments], check=True)


def job(directory: str) -> None:
    environment = dict(os.environ)
    environment["PYSPARK_SUBMIT_ARGS"] = "--master local[2] --conf spark.ui.enabled=false pyspark-shell"
    prepare_environment(environment, "local[2]")  # finds Java, and the Python for Spark's workers
    subprocess.run([sys.executable, str(HERE / "job.py"), directory], env=environment, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pyspark-job-") as directory, EmbeddedPostgres() as server:
        os.environ["PG_DSN"] = server.dsn
        with psycopg.connect(server.dsn, autocommit=True) as shop:
            shop.execute((HERE / "shop.sql").read_bytes())
            aqueduck("slots", "create", "sales")  # nothing is missed from here on
            shop.execute(ORDERS.format(1, 300))
            job(directory)
            shop.execute(ORDERS.format(301, 600))
            shop.execute("delete from orders where id = 5")
            job(directory)
        place = LakePlace(catalog=f"sqlite:{directory}/lake.sqlite", data_path="")
        with LakePool().use(place, read_only=True) as lake:
            sales = f"select country, count(*), sum(amount) from {lake.alias}.main.sales group by all order by all"
            for country, orders, amount in lake.execute(sales):
                print(f"{country}: {orders} orders, {amount}")


if __name__ == "__main__":
    main()
