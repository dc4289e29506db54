"""
Every kind of type with random values, as literals that PostgreSQL reads, and how two sides can be compared.

`source` and `lake` are expressions over the column `x` in PostgreSQL's and DuckDB's SQL that give the same text, or
text that `read` makes the same, without going through any of our code.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

Literals = st.SearchStrategy[str]

USER_TYPES = """
    create type mood as enum ('ok', 'so so', 'NULL', 'a,"b\\'); create type pair as (a int, b text);
    create domain amount as numeric(10, 2); create domain word as text check (value <> 'never');
    create domain small as smallint; create domain moods as mood[]; create domain numbers as int[];
    create type floatrange as range (subtype = float8);
"""

# Columns keep PostgreSQL's text unless they say otherwise; format() does not strip the padding of char(n).
TEXT, LAKE_TEXT = "case when x is not null then format('%s', x) end", "x::varchar"


@dataclass(frozen=True)
class TypeCase:
    """A type, its values, and what they are compared by."""

    name: str
    literals: Literals
    source: str = TEXT
    lake: str = LAKE_TEXT
    read: Callable[[str], Any] = str


def _exact_json(text: str) -> Any:
    return json.loads(text, parse_float=str, parse_int=str)


def _base64_of_hex(found: Any) -> Any:
    """Bytes as PostgreSQL writes them in hex, in lists, as base64."""
    if isinstance(found, list):
        return [_base64_of_hex(one) for one in found]
    if isinstance(found, str) and found.startswith("\\x"):
        return b64encode(bytes.fromhex(found[2:])).decode()
    return found


def _float(text: str) -> str:
    return repr(float(text))


characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.one_of(
    st.sampled_from(["", "NULL", "null", "\\N", "\\.", "a,b", '"', "'", "{}", "{a}", "\\", "\t\n\r", " x ", "é🦆", "[0:1]={a}", "a'b\"c"]),
    st.text(characters, max_size=12),
)  # fmt: skip
int2s, int4s, int8s = (st.integers(-(2**n), 2**n - 1) for n in (15, 31, 63))
floats = st.one_of(
    st.sampled_from(["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1e+300", "0.1"]), st.floats().map(repr)
)
reals = st.one_of(
    st.sampled_from(["NaN", "Infinity", "-0", "1e-45", "3.4028235e38"]), st.floats(width=32).map(repr)
)
dates = st.one_of(
    st.sampled_from(
        ["infinity", "-infinity", "4714-11-24 BC", "0001-12-31 BC", "5874897-12-31", "1970-01-01"]
    ),
    st.dates().map(str),
    st.builds("{:04d}-{:02d}-{:02d} BC".format, st.integers(1, 4713), st.integers(1, 12), st.integers(1, 28)),
    st.builds(
        "{:d}-{:02d}-{:02d}".format, st.integers(10_000, 5_874_896), st.integers(1, 12), st.integers(1, 28)
    ),
)
clocks = st.times().map(str)
far_times = st.sampled_from(["294247-01-10 04:00:54.775807", "294276-12-31 23:59:59.999999"])
near_times = st.one_of(
    st.sampled_from(["infinity", "-infinity", "4714-11-24 00:00:00 BC", "294247-01-10 04:00:54.775806"]),
    st.datetimes().map(str),
    st.builds("{:04d}-02-03 {} BC".format, st.integers(1, 4713), clocks),
    st.builds("{:d}-02-03 {}".format, st.integers(10_000, 294_246), clocks),
)
blobs = st.one_of(
    st.sampled_from(["", "\\x", "\\x5c78"]), st.binary(max_size=10).map(lambda b: "\\x" + b.hex())
)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts.filter(str.isprintable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts.filter(str.isprintable), inner, max_size=3),
    max_leaves=5,
).map(lambda value: json.dumps(value, ensure_ascii=False))  # fmt: skip
numbers = st.integers(-1000, 1000)
bits = st.text("01", max_size=9)
points = st.builds("({},{})".format, numbers, numbers)
addresses = st.ip_addresses().map(str)


def numerics(digits: int, scale: int, *, nan: bool = True) -> Literals:
    values = st.integers(-(10**digits) + 1, 10**digits - 1).map(lambda n: f"{Decimal(f'{n}e-{scale}'):f}")
    return st.one_of(values, st.just("NaN")) if nan else values


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array(values: list[str | None], rows: int, low: int, delimiter: str) -> str:
    """Of one dimension, or of `rows` rows that are all alike; with a lower bound if it is not 1."""
    if not values:
        return "{}"
    inner = delimiter.join("NULL" if v is None else _quoted(v) for v in values)
    literal = "{" + inner + "}"
    if rows:
        literal = "{" + delimiter.join([literal] * rows) + "}"
    bounds = f"[{low}:{low + rows - 1}]" * bool(rows) + f"[{low}:{low + len(values) - 1}]"
    return literal if low == 1 else f"{bounds}={literal}"


def arrays(literals: Literals, delimiter: str = ",") -> Literals:
    elements = st.lists(st.none() | literals, max_size=4)
    return st.builds(
        _array,
        elements,
        st.sampled_from([0, 0, 0, 1, 2]),
        st.sampled_from([1, 1, 1, 0, -3]),
        st.just(delimiter),
    )


def array_case(name: str, literals: Literals, elements: str = "x::text[]", delimiter: str = ",") -> TypeCase:
    """The expectation is PostgreSQL's own JSON, of the elements or of their text."""
    expected = f"case when x::text like '[%' then to_json(x::text) else to_json({elements}) end::text"
    read = (lambda text: _base64_of_hex(_exact_json(text))) if name == "bytea[]" else _exact_json
    return TypeCase(name, arrays(literals, delimiter), expected, read=read)


def ranges(bound: Literals) -> Literals:
    """Ranges whose bounds are in order."""
    return st.one_of(
        st.sampled_from(["empty", "(,)"]), bound.map("[{0},{0}]".format), bound.map("[{},)".format), bound.map("(,{})".format)
    )  # fmt: skip


def times(zone: str, literals: Literals, name: str) -> TypeCase:
    """Compared by microseconds since 1970; what is later than DuckDB's last time is infinity."""
    last = f"'294247-01-10 04:00:54.775806{zone}'::{name}"
    source = (
        f"case when not isfinite(x) then x::text when x > {last} then 'infinity'"
        " else (extract(epoch from x) * 1000000)::numeric(30,0)::text end"
    )
    lake = "case when isfinite(x) then epoch_us(x)::varchar else x::varchar end"
    zoned = literals.map(
        lambda t: t if "inf" in t else t.replace(" BC", "") + zone + " BC" * t.endswith(" BC")
    )
    return TypeCase(name, zoned, source, lake)


def all_types(*, keys: bool = False) -> list[TypeCase]:
    """Every kind of type; with `keys`, only values that stay different from each other in a lake."""
    moments = near_times if keys else near_times | far_times
    days = "case when isfinite(x) then (x - date '1970-01-01')::{0} else x::{0} end".format
    finite = "case when x <> 'NaN' then x end::text"
    moods = st.sampled_from(["ok", "so so", "NULL", 'a,"b\\'])
    whole = st.integers(-(10**45), 10**45).map(str)
    return [
        TypeCase("boolean", st.sampled_from(["t", "f"]), "x::text"),
        TypeCase("smallint", int2s.map(str)),
        TypeCase("integer", int4s.map(str)),
        TypeCase("bigint", int8s.map(str)),
        TypeCase("real", reals, "x::text", read=_float),
        TypeCase("double precision", floats, "x::text", read=_float),
        TypeCase("numeric(12,3)", numerics(12, 3), finite, read=Decimal),
        TypeCase("numeric(38,0)", numerics(38, 0), finite, read=Decimal),
        TypeCase("numeric(38,38)", numerics(38, 38), finite, read=Decimal),
        TypeCase(
            "numeric(3,-2)", numerics(3, 0).map(lambda n: n if n == "NaN" else n + "00"), finite, read=Decimal
        ),
        TypeCase("numeric(40,5)", numerics(40, 5)),
        TypeCase("numeric", st.one_of(floats, whole, st.sampled_from(["1.10", "1.1000", "1e-50"]))),
        TypeCase("text", texts),
        TypeCase("varchar(12)", texts.map(lambda t: t[:12])),
        TypeCase("char(12)", texts.map(lambda t: t[:12])),
        TypeCase('"char"', st.sampled_from(["", "a", " ", "\\", '"'])),
        TypeCase("name", texts.map(lambda t: t[:12])),
        TypeCase("bytea", blobs, "encode(x, 'hex')", "lower(hex(x))"),
        TypeCase("date", dates, days("text"), days("varchar")),
        TypeCase("time", st.just("24:00:00") | clocks, "x::text"),
        TypeCase("timetz", st.builds("{}{}".format, clocks, st.sampled_from(["+00", "+05:30", "-12:34:56"]))),
        times("", moments, "timestamp"),
        times("+00", moments, "timestamptz"),
        TypeCase("timestamp(0)", st.datetimes().map(str), "x::text"),
        TypeCase(
            "interval",
            st.builds(
                "{} months {} days {} microseconds".format, int2s, int2s, st.integers(-(10**12), 10**12)
            ),
        ),
        TypeCase("uuid", st.uuids().map(str)),
        TypeCase("json", jsons),
        TypeCase("jsonb", jsons),
        TypeCase("jsonpath", st.sampled_from(["$", "$.a[*] ? (@.b > 1)", 'lax $."x y"'])),
        TypeCase("money", st.integers(-(10**9), 10**9).map(lambda n: str(n / 100))),
        TypeCase("bit(3)", st.text("01", min_size=3, max_size=3)),
        TypeCase("varbit", bits),
        TypeCase("inet", st.one_of(addresses, st.sampled_from(["10.0.0.1/8", "::1/64"]))),
        TypeCase("cidr", addresses),
        TypeCase("macaddr", st.binary(min_size=6, max_size=6).map(bytes.hex)),
        TypeCase("macaddr8", st.binary(min_size=8, max_size=8).map(bytes.hex)),
        TypeCase("point", points),
        TypeCase("line", st.builds("{{{},{},{}}}".format, st.integers(1, 9), numbers, numbers)),
        TypeCase("lseg", st.builds("[{},{}]".format, points, points)),
        TypeCase("box", st.builds("{},{}".format, points, points)),
        TypeCase("path", st.builds("[{},{}]".format, points, points)),
        TypeCase("polygon", st.builds("({},{},{})".format, points, points, points)),
        TypeCase("circle", st.builds("<{},{}>".format, points, st.integers(0, 9))),
        TypeCase("tsvector", st.sampled_from(["", "a:1 b:2A", "'it''s' 'x y'"])),
        TypeCase("tsquery", st.sampled_from(["a & b", "!'x y' | c"])),
        TypeCase("int4range", ranges(st.integers(-9, 9).map(str))),
        TypeCase("numrange", ranges(numerics(9, 4, nan=False))),
        TypeCase("tstzrange", ranges(st.datetimes().map('"{}+00"'.format))),
        TypeCase("floatrange", ranges(st.integers(-9, 9).map(str))),
        TypeCase("datemultirange", st.sampled_from(["{}", "{[2024-01-01,2024-02-01),[2025-01-01,)}"])),
        TypeCase("oid", st.integers(0, 2**32 - 1).map(str)),
        TypeCase("xid8", st.integers(0, 2**63).map(str)),
        TypeCase("pg_lsn", st.integers(0, 2**60).map(lambda n: f"{n >> 32:X}/{n & 0xFFFFFFFF:X}")),
        TypeCase("mood", moods),
        TypeCase("pair", st.builds(lambda a, b: f"({a},{_quoted(b)})", int4s, texts)),
        TypeCase("amount", numerics(10, 2), finite, read=Decimal),
        TypeCase("word", texts),
        TypeCase("small", int2s.map(str)),
        array_case("boolean[]", st.sampled_from(["t", "f"]), "x"),
        array_case("smallint[]", int2s.map(str), "x"),
        array_case("bigint[]", int8s.map(str), "x"),
        array_case("double precision[]", floats, "x"),
        array_case("real[]", reals, "x"),
        array_case("numeric(12,3)[]", numerics(12, 3)),
        array_case("text[]", texts),
        array_case("varchar(12)[][]", texts.map(lambda t: t[:12])),
        array_case("bytea[]", blobs),
        array_case("date[]", dates),
        array_case("timestamptz[]", moments),
        array_case("uuid[]", st.uuids().map(str)),
        array_case("json[]", jsons.filter(lambda j: j != "null"), "x"),
        array_case("jsonb[]", jsons.filter(lambda j: j != "null"), "x"),
        array_case("box[]", st.builds("{},{}".format, points, points), delimiter=";"),
        array_case("mood[]", moods),
        array_case("pair[]", st.builds(lambda a, b: f"({a},{_quoted(b)})", int4s, texts)),
        array_case("amount[]", numerics(10, 2)),
        array_case("small[]", int2s.map(str), "x::smallint[]"),
        array_case("moods", moods),
        array_case("numbers", int4s.map(str), "x::int[]"),
        array_case("int4range[]", ranges(st.integers(-9, 9).map(str))),
    ]
