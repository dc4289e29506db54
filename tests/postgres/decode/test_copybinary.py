"""Promise 7: values decoded from binary COPY equal those decoded from text."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.engine import new_connection
from aqueduck.model.columns.typemap import TABLE
from aqueduck.model.errors import AqueduckError, ProtocolError
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.copy.table_copy import ChunkReader, export_snapshot, plan_chunks
from aqueduck.postgres.decode import copybinary
from tests.chunk_files import written_chunk
from tests.fix_postgres import Database
from tests.tls_proxy import make_certificates, tls_proxy

VALUES = {
    "boolean": ["t", "f"],
    "smallint": ["-32768", "32767", "0"],
    "integer": ["-2147483648", "2147483647", "-1"],
    "bigint": ["-9223372036854775808", "9223372036854775807", "-1"],
    "real": ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "0.1"],
    "double precision": ["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1"],
    "text": ["", "\\N", "a\tb\nc\\d", "žluťoučký 🐎"],
    "character varying": ["", "x" * 3000],
    "character(5)": ["", "ab", "abcde"],
    "date": ["infinity", "-infinity", "0044-03-15 BC", "4713-01-01 BC", "0001-01-01", "1969-12-31", "5874897-12-31"],
    "timestamp": [
        "infinity", "-infinity", "4713-01-01 00:00:00 BC", "0001-01-01 00:00:00", "1969-12-31 23:59:59.999999",
        "2000-01-01", "9999-12-31 23:59:59.999999", "294247-01-10 04:00:54.775806", "294247-01-10 04:00:54.775807",
        "294276-12-31 23:59:59.999999",
    ],
    "timestamptz": [
        "infinity", "-infinity", "4713-01-02 00:00:00 BC", "2026-06-01 12:00+02", "294247-01-10 04:00:54.775806+00",
        "294276-12-31 00:00:00+00",
    ],
    "bytea": ["\\x", "\\x00ff", "\\x" + "c3" * 3000],
    "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "jsonb": ['{"a": [1, null]}', "null", '""', "1e400", '"\\ud83d\\ude00 \\u0001"', "[" * 200 + "]" * 200, "1" * 400],
    "time": ["00:00:00", "23:59:59.999999", "24:00:00"],
    "numeric(10,2)": ["NaN", "0", "-99999999.99", "99999999.99", "0.01", "-0.01", "10000", "10000.1", "12345678.9"],
    "numeric(4,0)": ["9999", "-9999", "1"],
    "numeric(18,5)": ["9999999999999.99999", "-9999999999999.99999", "0.00001", "1000000000000"],
    "numeric(18,18)": ["0.999999999999999999", "-0.000000000000000001", "0.0001"],
    "numeric(19,3)": ["9999999999999999.999", "-9999999999999999.999", "NaN", "0.001", "0"],
    "numeric(38,0)": ["9" * 38, "-" + "9" * 38, "18446744073709551616", "-18446744073709551616", "4294967296"],
    "numeric(38,38)": ["0." + "9" * 38, "-0." + "0" * 37 + "1"],
    "numeric(38,17)": ["123456789012345678901.12345678901234567", "-1", "1e20", "-1e-17"],
    # Digits on one side of the point only: a scale larger than the precision, and a negative one.
    "numeric(2,5)": ["0.00099", "-0.00001"],
    "numeric(3,-2)": ["99900", "-100"],
    # Nothing of a cell's own type: these arrive as text beside the others.
    "numeric": ["NaN", "-Infinity", "0.10"],
    "numeric(1000,2)": ["-99999999.99"],
    "inet": ["10.0.0.1", "10.0.0.0/8"],
    "interval": ["1 mon -2 days"],
    # Cast by DuckDB.
    "json": ['{"a": [1, null]}', '"\\ud800"'],
    "int[]": ["{1,NULL,3}", "{}"],
}  # fmt: skip
PLAIN = list(VALUES)[:-2]

NOTHING, EMPTY = np.zeros(8, np.uint8), np.empty(0, np.int64)


def numeric(*groups: int, weight: int = 0, sign: int = 0) -> bytes:
    """A numeric in binary: groups of four digits, the first of which counts 10 000 ** weight."""
    return struct.pack(f">hhHh{len(groups)}h", len(groups), weight, sign, 0, *groups)


def copies(
    db: Database, table: str, directory: Path, *, chunk_bytes: int = 1 << 30
) -> tuple[duckdb.DuckDBPyConnection, list[str]]:
    """Files of the same snapshot by both ways, as the views b and t of a DuckDB connection; and the files' makers."""
    schema = describe_table(db.observer, table, need_key=False)
    snapshot = export_snapshot(db.dsn)
    con, makers = new_connection(), []
    for view in "bt":
        paths: list[str] = []
        with ChunkReader(db.dsn, snapshot.name) as reader:
            read = reader.rows if view == "b" else reader.texts
            for chunk in plan_chunks(db.observer, schema, chunk_bytes=chunk_bytes):
                file = written_chunk(
                    read(schema, chunk), schema, data_path=str(directory),
                    directory=str(directory / view), name=f"c{chunk.number}", chunk=chunk.number,
                )  # fmt: skip
                paths += file.paths
        listed = ", ".join(f"'{path}'" for path in paths)
        con.execute(f"create view {view} as from read_parquet([{listed}])")
        makers.append(
            str(con.execute(f"select created_by from parquet_file_metadata([{listed}])").fetchone())
        )
    snapshot.close()
    return con, makers


def fill(db: Database, table: str, types: list[str]) -> None:
    """Each value in a row of its own, the other cells null; and a row without any."""
    columns = ", ".join(f"c{i} {name}, n{i} text" for i, name in enumerate(types))
    db.observer.execute(f"create table {table} ({columns})".encode())
    db.observer.execute(f"insert into {table} default values".encode())
    for i, name in enumerate(types):
        for value in VALUES[name]:
            db.observer.execute(f"insert into {table} (c{i}, n{i}) values (%s, %s)".encode(), (value, value))


@pytest.mark.parametrize("types", [PLAIN, list(VALUES)], ids=["written by Arrow", "written by DuckDB"])
def test_binary_leads_to_the_values_that_text_leads_to(
    db: Database, tmp_path: Path, types: list[str]
) -> None:
    fill(db, "every", types)
    con, makers = copies(db, "every", tmp_path)
    assert ("DuckDB" in makers[0]) == (types is not PLAIN)
    assert con.execute("select count(*) from b").fetchone() == (1 + sum(len(VALUES[n]) for n in types),)
    assert con.execute("describe b").fetchall() == con.execute("describe t").fetchall()
    # As text, so that NaN and -0 count, and in both directions with duplicates.
    text = "select hash(columns(*)::text), columns(*)::text"
    assert con.execute(f"({text} from b) except all ({text} from t)").fetchall() == []
    assert con.execute(f"({text} from t) except all ({text} from b)").fetchall() == []
    # Row groups are skipped by the files' statistics: every value is still found by an equality and by an order.
    for i, name in enumerate(types):
        for value in VALUES[name]:
            for operator in ("=", "<=", ">="):
                query = f"select count(*) from b where c{i} {operator} (select c{i} from t where n{i} = ?)"
                assert (
                    con.execute(query, [value]).fetchone()
                    == con.execute(query.replace("from b", "from t", 1), [value]).fetchone()
                ), (name, value, operator)


def test_rows_of_many_buffers_and_tables_without_rows(db: Database, tmp_path: Path) -> None:
    db.observer.execute("create table many (id int primary key, v text, d double precision)")
    db.observer.execute(
        "insert into many select g, nullif(repeat('ä', g % 200), ''), g / 7.0 from generate_series(1, 60000) g"
    )
    db.observer.execute("delete from many where id % 3 = 0")
    con, makers = copies(db, "many", tmp_path, chunk_bytes=1 << 20)
    assert "DuckDB" not in makers[0]
    assert con.execute("select count(*), count(distinct id) from b").fetchone() == (40_000, 40_000)
    assert con.execute("(from b) except all (from t)").fetchall() == []
    db.observer.execute("create table nothing (id int primary key)")
    schema = describe_table(db.observer, "nothing")
    [chunk] = plan_chunks(db.observer, schema, chunk_bytes=1 << 20)
    snapshot = export_snapshot(db.dsn)
    with ChunkReader(db.dsn, snapshot.name) as reader:
        assert list(reader.rows(schema, chunk)) == []
    snapshot.close()


def test_every_listed_type_has_the_lakes_type() -> None:
    """DuckDB takes what a column is decoded to for the type that docs/types.md says."""
    lake = {oid: row.lake for row in TABLE for oid, _ in row.oids.values()}
    con = new_connection()
    for oid, kind in copybinary.BINARY.items():
        con.register("decoded", pa.table({"c": copybinary.decode_column(NOTHING, EMPTY, EMPTY, kind)}))
        assert con.execute("select typeof(c) from (from decoded union all select null)").fetchall() == [
            (lake[oid],)
        ]


@pytest.mark.parametrize(
    "frame",
    [b"", b"\0", b"\0\2\0\0\0\1x", b"\0\1\0\0", b"\0\1\0\0\0\5ab", b"\0\1\0\0\0\1xy", b"\xff\xff\0"],
    ids=["empty", "no count", "other count", "no length", "cut", "too long", "trailer too long"],
)
def test_a_broken_frame_is_an_error(frame: bytes) -> None:
    buf = np.frombuffer(frame + b"\0" * 8, np.uint8)
    with pytest.raises(ProtocolError):
        copybinary.cells_of(buf, 1, np.array([0]), np.array([len(frame)]), 1)


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        (pa.int32(), b"\0\0\1"),
        (pa.uuid(), b"\0" * 15),
        (copybinary.JSON, b""),
        (copybinary.JSON, b"\2{}"),
        (pa.decimal64(4, 2), b"\0\0\0\0"),
        (pa.decimal64(4, 2), numeric(1, sign=0xD000)),  # infinity
        (pa.decimal64(4, 2), numeric(1, 2)[:-1]),
        (pa.decimal64(4, 2), numeric(100)),
        (pa.decimal64(4, 2), numeric(1, 0, 0, weight=2)),
        (pa.decimal64(4, 2), numeric(1, weight=20)),
        (pa.decimal64(4, 2), numeric(0, 1)),  # a ten-thousandth
        (pa.decimal64(4, 2), numeric(0, 100, 1)),
        (pa.decimal64(18, 0), numeric(100, 0, 0, 0, 0, weight=4)),
        (pa.decimal128(38, 2), numeric(0, 1)),
        (pa.decimal128(38, 0), numeric(100, *[0] * 9, weight=9)),
        (pa.decimal128(38, 0), numeric(9999, *[9999] * 9, weight=9)),
        (pa.decimal128(19, 0), numeric(1000, 0, 0, 0, 0, weight=4)),
        (pa.decimal128(38, 0), numeric(1, weight=20)),
        (pa.decimal128(38, 0), numeric(1, 1)),
    ],
)
def test_a_cell_that_its_type_does_not_have_is_an_error(kind: pa.DataType, cell: bytes) -> None:
    """And nothing is rounded or cut."""
    buf = np.frombuffer(cell + b"\0" * 8, np.uint8)
    with pytest.raises(ProtocolError):
        copybinary.decode_column(buf, np.array([0]), np.array([len(cell)]), kind)


def test_a_header_of_another_format_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        copybinary.skip_header(np.zeros(40, np.uint8), np.array([0]), np.array([40]))


def test_nothing_is_locked_between_two_chunks(db: Database) -> None:
    """Who alters two tables in a transaction waits for a chunk of one of them, and never for one that waits for him."""
    for name in "ab":
        db.execute(f"create table {name} (id int primary key); insert into {name} values (1), (2)")
    schemas = [describe_table(db.observer, name) for name in "ab"]
    snapshot = export_snapshot(db.dsn)
    with ChunkReader(db.dsn, snapshot.name) as reader, db.connect() as other:
        for schema in schemas:
            db.execute(f"insert into {schema.name} values (3)")  # the snapshot does not show it
            [chunk] = plan_chunks(db.observer, schema, chunk_bytes=1 << 20)
            assert [batch.column(0).to_pylist() for batch in reader.rows(schema, chunk)] == [[1, 2]]
            with other.transaction():
                for name in "ab":
                    other.execute(f"lock table {name} in access exclusive mode nowait".encode())
            assert [batch.column(0).to_pylist() for batch in reader.texts(schema, chunk)] == [["1", "2"]]
    snapshot.close()


def test_several_chunks_come_over_tls(new_server: Callable[..., EmbeddedPostgres], tmp_path: Path) -> None:
    """P-S23: rows read through TLS are the same, chunk after chunk on one connection; errors are reported as without TLS."""
    server = new_server(password="s3cret")
    db = Database(server, "postgres")
    files = make_certificates(tmp_path, "127.0.0.1")
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select g, repeat(md5(g::text), g % 50) from generate_series(1, 3000) g")
    schema = describe_table(db.observer, "t")
    chunks = plan_chunks(db.observer, schema, chunk_bytes=1 << 19)
    assert len(chunks) > 3
    snapshot = export_snapshot(db.dsn)
    with tls_proxy(server.port, files.server) as port:
        tls = {"sslmode": "verify-full", "sslrootcert": str(files.authority)}
        dsn = server.dsn_for("postgres", "postgres", port=port, password="s3cret", **tls)
        found = []
        for how in (db.dsn, dsn):
            with ChunkReader(how, snapshot.name) as reader:
                found.append(
                    pa.concat_tables(
                        pa.Table.from_batches(list(reader.rows(schema, chunk))) for chunk in chunks
                    )
                )
                with pytest.raises(AqueduckError) as error:
                    list(reader.rows(replace(schema, name="gone"), replace(chunks[0], table="gone")))
                assert error.value.code == "pg.table_missing"
        assert found[0].num_rows == 3000
        assert found[0].equals(found[1])
    snapshot.close()
