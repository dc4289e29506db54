"""
P-S28: the settings that users know from elsewhere.

Each is known to the file and to SQL with the same default and range, and what is set arrives where it acts.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqueduck.config.sync import GroupConfig, LakeConfig
from aqueduck.lake.fold.fold_tasks import TASK_MEMORY, FoldedFiles
from aqueduck.model.batches import FoldTask, plan_fold_tasks
from aqueduck.model.errors import ConfigError, LakeWriteError
from aqueduck.postgres.capture.stage import Cut
from aqueduck.postgres.registry.registry import call, install, rows_of
from aqueduck.spark.query.capture_source import CaptureReader, FoldPartition
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.control import open_control
from tests.fix_postgres import Database, wait_until
from tests.model.test_batches import MIB, segment
from tests.postgres.registry.wishes import config_of
from tests.whole_group import WholeGroup, whole_group

#: What users call them, and what they are here.
KNOWN = {
    "flush interval": "flush_interval_ms",
    "flush batch threshold": "batch_bytes_max",
    "queue bytes": "stage_bytes_max",
    "concurrent flushes": "fold_concurrency",
    "poll interval": "poll_interval_ms",
    "inlining limit": "inline_rows",
    "kernel memory": "task_memory",
}


def test_file_and_sql_have_the_same_settings_with_the_same_default_and_range(db: Database) -> None:
    """All settings, so that none is accepted by one and refused by the other."""
    with db.connect() as conn:
        install(conn)
        listed = {row["name"]: row for row in rows_of(conn, "list_settings")}
        assert set(KNOWN.values()) <= listed.keys()
        for name, row in listed.items():
            if row["choices"] is not None:
                continue
            section = LakeConfig if name == "inline_rows" else GroupConfig
            assert int(section.model_fields[name].default) == int(row["default_value"])
            for edge in ("lowest", "highest"):
                _take(conn, name, row[edge])
                _refuse(conn, name, row[edge] + (1 if edge == "highest" else -1))


def _take(conn: psycopg.Connection[Any], name: str, value: int) -> None:
    call(conn, "set_setting", name=name, value=value)
    assert call(conn, "get_setting", name=name) == str(value)
    config = _in_file(name, value)
    assert int(getattr(config.lake if name == "inline_rows" else config.groups[0], name)) == value


def _refuse(conn: psycopg.Connection[Any], name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        _in_file(name, value)
    with pytest.raises(ConfigError, match=name):
        call(conn, "set_setting", name=name, value=value)


def _in_file(name: str, value: int) -> Any:
    if name == "inline_rows":
        return config_of({"name": "g"}, inline_rows=value)
    return config_of({"name": "g", name: value})


def test_what_is_set_arrives_where_it_acts(db: Database, tmp_path: Path) -> None:
    """From SQL over what is wanted to the settings of the capture, the tasks and the copies."""
    db.execute("create table t (id int primary key, v text)")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        with contextlib.closing(open_control(group.config)) as control:
            values = {
                "flush_interval_ms": 250,
                "batch_bytes_max": 1 << 25,
                "stage_bytes_max": 1 << 26,
                "fold_concurrency": 3,
                "poll_interval_ms": 70,
                "inline_rows": 9,
                "task_memory": 1 << 28,
            }
            assert set(values) == set(KNOWN.values())
            for name, value in values.items():
                db.execute(f"select aqueduck.set_setting('{name}', {value}, group_name => 'test')")
            [wanted] = control.wanted()
        [row] = wanted.rows.values()
        assert row.settings.inline_rows == 9
        group.with_options(**{n: int(getattr(wanted.group, n)) for n in values if n != "inline_rows"})
        group.restart({"t": {}})
        settings = group.runner.settings(0)
        assert (settings.flush_interval_seconds, settings.poll_interval_seconds) == (0.25, 0.07)
        assert (settings.batch_bytes_max, settings.stage_bytes_max) == (1 << 25, 1 << 26)
        assert settings.fold_concurrency == 3
        assert group.runner.query.writer.task_memory == group.runner.copier.settings.task_memory == 1 << 28


def test_a_batch_is_folded_by_as_many_tasks_as_it_may_have(db: Database, tmp_path: Path) -> None:
    """With `fold_concurrency` 1 all fold tasks of a batch are one partition, and its task handles all of them."""
    db.execute("create table t (id int primary key)")
    segments = [segment(i, oid=oid, size=40 * MIB) for oid in (1, 2) for i in range(3 * oid, 3 * oid + 3)]
    segments.append(segment(99, oid=3, size=10))
    with whole_group(db, tmp_path, {"t": {}}) as group:
        for most, partitions in [(1, [7]), (2, [4, 3]), (4, [2, 2, 1, 2]), (7, [1] * 7), (64, [1] * 7)]:
            settings = replace(group.runner.settings(0), fold_concurrency=most)
            settings.save(tmp_path / "settings.json")
            reader = CaptureReader(str(tmp_path / "settings.json"), group.runner.query.writer.to_json())
            reader._running = _Staged([Cut(5, 6, tuple(segments), 0)]), None  # type: ignore[assignment]
            planned = reader.partitions({"position": 0}, {"position": 5})
            found = [p.tasks for p in planned if isinstance(p, FoldPartition)]
            assert [len(tasks) for tasks in found] == partitions, most
            fold_tasks = [FoldTask.from_json(text) for tasks in found for text in tasks]
            assert sorted(task.segments[0].first_ord for task in fold_tasks) == [3, 4, 5, 6, 7, 8, 99]


class _Staged:
    def __init__(self, cuts: list[Cut]) -> None:
        self.cuts = cuts

    def between(self, _after: int, _upto: int) -> list[Cut]:
        return self.cuts


def test_a_task_has_the_memory_that_it_was_given(db: Database, tmp_path: Path) -> None:
    """A fold and a copy with too little memory report it with the next step; with the default they pass."""
    db.execute(
        "create table t (id int primary key, v text);"
        "insert into t select n, repeat(md5(n::text), 30) from generate_series(1, 20000) n"
    )
    with whole_group(db, tmp_path, {"t": {"mode": "history"}}) as group:
        jobs: list[CopyJob] = []
        copier = group.runner.copier

        def too_small(job: CopyJob) -> Any:
            jobs.append(job)
            return replace(job, task_memory=1 << 20).run(range(len(job.items)))

        copier.jobs.run = too_small
        group.runner.resync(next(iter(group.runner.tables)))
        wait_until(lambda: not copier.busy, "the copy has ended", 60)
        with pytest.raises(LakeWriteError, match=r"out of memory .*task_memory"):
            copier.raise_failures()
        assert jobs[0].task_memory == TASK_MEMORY
        copier.jobs.run = lambda job: job.run(range(len(job.items)))
        copier.retry_now(next(iter(group.runner.tables)))
        group.copy()
        db.execute("update t set v = v || 'x'")
        tasks = _fold_tasks(group)
        writer = group.runner.query.writer
        with pytest.raises(LakeWriteError, match=r"out of memory .*task_memory"):
            [replace(writer, task_memory=1 << 20).write(task) for task in tasks]
        assert all(isinstance(writer.write(task), FoldedFiles) for task in tasks)
        group.apply(tasks=True)
        assert all(compared.same for compared in group.verify())


def _fold_tasks(group: WholeGroup) -> list[FoldTask]:
    """What the next batch is going to be."""
    return plan_fold_tasks((s for cut in group.cuts() for s in cut.segments), direct_bytes_max=-1)
