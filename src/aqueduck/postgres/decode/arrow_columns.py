"""The cells of some rows as Arrow columns: text, lists of unchanged columns, and positions; pure functions for `decoder`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aqueduck.postgres.decode import pgoutput as wireformat
from aqueduck.postgres.decode.layouts import Layout

__all__ = ["column_of", "own_lsns", "unchanged_of"]

_BYTES_SINCE_LSN = 29  # between the LSN in a message's header and the row in it


def _strings(buf: wireformat.Bytes, off: wireformat.Ints, length: wireformat.Ints) -> pa.Array:
    offsets, data, validity, nulls = wireformat.gather(buf, off, length)
    buffers = [
        None if validity is None else pa.py_buffer(validity),
        pa.py_buffer(offsets),
        pa.py_buffer(data),
    ]
    return pa.Array.from_buffers(pa.string(), length.size, buffers, nulls)


def column_of(
    buf: wireformat.Bytes, layout: Layout, index: int, off: wireformat.Ints, length: wireformat.Ints
) -> pa.Array:
    at = layout.sent[index]
    if index in layout.blank:
        return pa.nulls(length[at].size, pa.string())
    return _strings(buf, off[at], length[at])


def own_lsns(buf: wireformat.Bytes, row_at: wireformat.Ints) -> wireformat.Ints:
    """The positions in the headers of the messages; outside streamed transactions, rows begin a fixed distance after these."""
    at = row_at - _BYTES_SINCE_LSN
    lsns: wireformat.Ints = buf[at[:, None] + np.arange(8)].view(">i8").ravel().astype(np.int64)
    return lsns


def unchanged_of(cells: wireformat.Cells, layout: Layout) -> pa.Array:
    if not cells.unchanged_total:
        return pa.nulls(cells.op.size, pa.list_(pa.int16()))
    offsets, values = wireformat.unchanged_lists(cells)
    if len(layout.sent) < layout.key_mask.size:
        offsets, values = _places(layout, offsets, values)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(cells.unchanged == 0))


def _places(
    layout: Layout, offsets: npt.NDArray[np.int32], values: npt.NDArray[np.int16]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
    """Map lists of columns of the stream to columns of the table."""
    place = np.full(layout.key_mask.size, -1, np.int16)
    place[list(layout.sent)] = np.arange(len(layout.sent), dtype=np.int16)
    moved = place[values]
    kept = np.concatenate(([0], np.cumsum(moved >= 0)))
    return kept[offsets].astype(np.int32), moved[moved >= 0]
