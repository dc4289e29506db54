"""
A PySpark job of your own: new orders, joined with their customers, into a lake table that Spark did not have to know.

    PG_DSN=postgresql://… spark-submit job.py DIRECTORY

`run.py` beside it starts this on an embedded PostgreSQL.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

import aqueduck


def main() -> None:
    directory = Path(sys.argv[1])
    lake = {"catalog": f"sqlite:{directory}/lake.sqlite", "data_path": f"{directory}/lake_data/"}
    spark = SparkSession.builder.appName("sales by country").getOrCreate()
    aqueduck.register(spark)

    customers = (
        spark.read.format("postgres_table").options(dsn_env="PG_DSN", table="customers").load().cache()
    )
    orders = (
        spark.readStream.format("postgres_cdc")
        .options(dsn_env="PG_DSN", slot="sales", publication="sales", table="orders")
        .load()
        .where("_op = 'insert'")
    )
    sales = orders.join(customers.withColumnRenamed("id", "customer"), "customer")
    query = (
        sales.select("id", "amount", "country")
        .writeStream.format("ducklake")
        .options(**lake)
        .option("table", "sales")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
