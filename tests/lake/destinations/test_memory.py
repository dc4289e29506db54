"""A seed of a table that is much larger than the memory of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROWS, MEMORY_MB = 3_000_000, 256
SEED = """
import resource, sys
from pathlib import Path
from aqueduck.lake.destinations.buckets import apply_bucket
from aqueduck.lake.source.lake_changes import Routes, chunks, read_routed
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.source_lake import SourceLake
from tests.fanout_lakes import Fan, T

fan = Fan(Path(sys.argv[1]), {"one": "a", "two": "b"}, pool=LakePool(threads=2, memory_limit=sys.argv[2]))
with fan.pool.use(fan.place("source"), read_only=True) as lake:
    plan = SourceLake(lake, T).plan_scan("c", ("id",), SourceLake(lake, T).latest())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
mine = list(fan.destinations().values())
name, report = read_routed(fan.pool, plan, Routes(("a", "b"), (0, 0), (0, 0)))
progress = []
streams = (chunk for chunk, rows in chunks(fan.pool, name, plan, 0) if progress.append(rows) is None)
done = apply_bucket(fan.pool, plan, dict(enumerate(mine)), streams, instance="test", threads=2)
assert [a.error for a in done] == [None, None], done
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(before, peak, report.rows, len(progress))
"""


@pytest.mark.slow
def test_a_seed_larger_than_memory_stays_within_it(tmp_path: Path) -> None:
    """P-F10: rows wait on disk; memory is the engine's limit and what one writer holds, for any size of the table."""
    from tests.fanout_lakes import Fan

    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    cells = " || ".join(f"md5((i * {n})::varchar)" for n in range(3, 11))
    fan.change(
        "create table lake.t (id bigint, c varchar, v varchar)",
        f"insert into lake.t select i, if(i % 8 = 0, 'b', 'a'), {cells} from range({ROWS}) r(i)",
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SEED, str(tmp_path), f"{MEMORY_MB}MB"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    before, peak, rows, steps = map(int, done.stdout.split())
    assert (rows, steps > 50) == (ROWS, True)
    assert ROWS * 260 >> 20 > 2 * MEMORY_MB, "the rows do not fit into the memory"
    assert peak - before < 2.5 * MEMORY_MB, f"{before} MiB before, {peak} MiB at most"
    counted = "select count(*), sum(id), sum(hash(v)::hugeint) from lake.t"
    for name, value in fan.values.items():
        expected = fan.source.execute(f"{counted} where c = '{value}'").fetchall()
        assert fan.look(name, counted) == expected
    fan.close()
