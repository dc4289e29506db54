"""The bookmark in a lake: there after a catalog that was lost for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import LakeError, Retry
from aqueduck.sinks.bookmark_lake import LakeBookmarks, read_lake_bookmark


class _CutOff(LakeBookmarks):
    """Loses the catalog in the middle of a transaction."""

    cut: Callable[[], None] | None = None

    def _put(self, bookmark: Bookmark) -> None:
        super()._put(bookmark)
        if self.cut is not None:
            self.cut()


def test_a_catalog_that_was_lost_is_found_again(
    tmp_path: Path, new_server: Callable[..., EmbeddedPostgres]
) -> None:
    """P-E03: calls that fail while the catalog is away may be retried, and work when it is back: DuckDB reconnects."""
    server = new_server()
    config = LakeConfig(catalog=f"postgres:{server.dsn_for('postgres')}", data_path=str(tmp_path / "data"))
    with contextlib.closing(_CutOff(config, "s")) as store:
        store.save(Bookmark(10, "c"))
        store.cut = lambda: server.stop("immediate")
        for attempt in (lambda: store.save(Bookmark(20, "c")), store.load, store.load):
            with pytest.raises(LakeError) as error:
                attempt()
            assert error.value.retry is Retry.AUTO
        server.start()
        store.cut = None
        assert store.load() == Bookmark(10, "c")
        store.save(Bookmark(30, "c"))
    assert read_lake_bookmark(config, "s") == Bookmark(30, "c")
