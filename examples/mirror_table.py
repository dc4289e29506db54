"""
A PySpark job of your own: follow one PostgreSQL table and keep it in a DuckLake, exactly once.

    spark-submit examples/mirror_table.py --dsn-env PG_DSN --table public.orders --keys id \
        --catalog sqlite:/data/lake.sqlite --data-path /data/lake/ --checkpoint /data/checkpoint

The slot and the publication are made at the first start.  `--history` keeps every change instead of the
current rows; `--once` ends when everything that is committed now is in the lake.
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import aqueduck


def main() -> None:
    parser = argparse.ArgumentParser(description="keep a PostgreSQL table in a DuckLake")
    for name in ("--dsn-env", "--table", "--keys", "--catalog", "--data-path", "--checkpoint"):
        parser.add_argument(name, required=True)
    parser.add_argument("--slot", default="mirror_table")
    parser.add_argument("--history", action="store_true")
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()

    spark = SparkSession.builder.appName("mirror table").getOrCreate()
    aqueduck.register(spark)

    changes = (
        spark.readStream.format("postgres_cdc")
        .option("dsn_env", arguments.dsn_env)
        .option("slot", arguments.slot)
        .option("publication", arguments.slot)
        .option("table", arguments.table)
        .option("create", "true")
        .load()
        .drop("_commit_time")
    )
    target = arguments.table.rpartition(".")[2]
    if arguments.history:
        written = changes.writeStream.option("table", f"{target}_history")
    else:
        steering = {
            "keys": arguments.keys,
            "op": "_op",
            "order": "_commit_lsn,_seq",
            "unchanged": "_unchanged",
        }
        written = changes.writeStream.options(**steering).option("table", target)
    query = (
        written.format("ducklake")
        .option("catalog", arguments.catalog)
        .option("data_path", arguments.data_path)
        .option("checkpointLocation", arguments.checkpoint)
        .trigger(**({"availableNow": True} if arguments.once else {"processingTime": "1 second"}))
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
