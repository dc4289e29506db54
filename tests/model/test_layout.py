"""Names of directories of partitions."""

from __future__ import annotations

import duckdb
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.model.layout import PartitionKey, SortKey, TableLayout, goes_into_path, path_part, path_value


@given(st.text().filter(lambda text: "\0" not in text))
def test_a_value_in_a_path_is_encoded_as_duckdb_encodes_it(text: str) -> None:
    """A merge needs the same directory for files that we name and files that DuckLake names."""
    found = duckdb.execute("select url_encode(?)", [text]).fetchone()
    assert found is not None
    assert path_part("k", text) == f"k={found[0]}"
    if goes_into_path(["k"], [text]):
        assert path_value(path_part("k", text).partition("=")[2]) == text


def test_a_layout_survives_json() -> None:
    """Tasks get the layout that the driver read."""
    keys = (PartitionKey("a", kind="varchar"), PartitionKey("id", "bucket", 4, "int32"))
    layout = TableLayout(keys, (SortKey("a", True, False, "a"),), False, False)
    assert TableLayout.from_json(layout.to_json()) == layout
