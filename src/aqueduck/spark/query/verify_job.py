"""
Read both sides of a comparison: in this process, or as a Spark job with one task per piece.

A `SourceRead` is one range of pages of a source table under an exported snapshot, a `LakeRead` a lake
table at a lake snapshot.  Each answers a `Question`.  Spark adds the answers of a part's pieces, so that the
driver gets one answer per part, however large the table is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import AccumulatorParam
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.compare.digest import MEMORY, Answer, Question, ask_lake, ask_stream, with_version
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.model.errors import AqueduckError
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.copy.table_copy import Chunk, ChunkReader

__all__ = ["Gently", "InProcess", "LakeRead", "OnSpark", "Reader", "SourceRead"]

POLL_SECONDS = 0.2

Done = Callable[[int, int], None]
"""Called with a part and the number of its pieces read since the last call."""


@dataclass(frozen=True, slots=True)
class SourceRead:
    """A range of pages of a source table; `part` identifies the answer to which it adds."""

    part: int
    dsn: str
    snapshot: str
    schema: TableSchema
    chunk: Chunk
    question: Question
    condition: str | None = None

    def answer(self, keys: Mapping[int, pa.Array]) -> Answer:
        try:
            with ChunkReader(self.dsn, self.snapshot) as reader:
                rows = reader.texts(with_version(self.schema), self.chunk, self.condition)
                return ask_stream(rows, self.schema, self.question, keys.get(self.part))
        except AqueduckError as exc:
            return Answer(error=str(exc))


@dataclass(frozen=True, slots=True)
class LakeRead:
    """A lake table at a lake snapshot."""

    part: int
    lake: LakeConfig
    target: TableName
    version: int
    schema: TableSchema
    question: Question
    mode: TableMode = UPSERT

    def answer(self, keys: Mapping[int, pa.Array]) -> Answer:
        """In a worker: answer on a new session."""
        try:
            with open_lake(self.lake, threads=1, memory_limit=MEMORY, read_only=True) as session:
                return self.answer_on(session, keys)
        except AqueduckError as exc:
            return Answer(error=str(exc))

    def answer_on(self, session: LakeSession, keys: Mapping[int, pa.Array]) -> Answer:
        try:
            with session.reading() as con:
                return ask_lake(
                    con,
                    self.target,
                    self.version,
                    self.schema,
                    self.question,
                    keys.get(self.part),
                    self.mode,
                )
        except AqueduckError as exc:
            return Answer(error=str(exc))


class Reader(Protocol):
    """A way to read both sides."""

    def read(
        self, reads: Sequence[SourceRead | LakeRead], keys: Mapping[int, pa.Array], done: Done
    ) -> dict[int, Answer]:
        """The answer of each part; for a part with an entry in `keys`, only rows with these keys count."""
        ...


@dataclass
class InProcess:
    """Reads one after another, on the caller's session."""

    session: LakeSession

    def read(
        self, reads: Sequence[SourceRead | LakeRead], keys: Mapping[int, pa.Array], done: Done
    ) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for read in reads:
            piece = read.answer_on(self.session, keys) if isinstance(read, LakeRead) else read.answer(keys)
            answers[read.part] = answers[read.part].plus(piece) if read.part in answers else piece
            done(read.part, 1)
        return answers


class OnSpark:
    """
    Reads each piece in a Spark task.

    A catalog that only this process can open (a DuckDB file, or a SQLite file if the workers are
    on other machines) is read in this process, on `session`.
    """

    def __init__(self, spark: SparkSession, session: LakeSession) -> None:
        self._context = spark.sparkContext
        local = str(self._context.master).startswith("local")
        self._workers_attach = session.kind == "postgres" or (session.kind == "sqlite" and local)
        self._here = InProcess(session)

    def read(
        self, reads: Sequence[SourceRead | LakeRead], keys: Mapping[int, pa.Array], done: Done
    ) -> dict[int, Answer]:
        here = [r for r in reads if isinstance(r, LakeRead) and not self._workers_attach]
        there = [r for r in reads if isinstance(r, SourceRead) or self._workers_attach]
        answers = self._here.read(here, keys, done)
        return {**answers, **self._job(there, keys, done)} if there else answers

    def _job(
        self, reads: Sequence[SourceRead | LakeRead], keys: Mapping[int, pa.Array], done: Done
    ) -> dict[int, Answer]:
        counts = self._context.accumulator({}, _Counts())
        wanted = self._context.broadcast(dict(keys))

        def answer(read: SourceRead | LakeRead) -> tuple[int, Answer]:
            piece = read.answer(wanted.value)
            counts.add({read.part: 1})
            return read.part, piece

        pieces = self._context.parallelize(reads, len(reads)).map(answer)
        with _Watch(lambda: counts.value, done):
            try:
                return dict(pieces.reduceByKey(Answer.plus, min(len(reads), 8)).collect())
            except (PySparkException, Py4JError) as exc:
                raise AqueduckError.from_text(str(exc)) or AqueduckError(
                    f"the comparison failed: {type(exc).__name__}"
                ) from exc
            finally:
                wanted.destroy()


class Gently:
    """
    Reads one piece at a time, to leave capacity for other work: the source by `there`, the lake here on `session`.

    `pause` is called before each piece and raises if the piece must not be read now.
    """

    def __init__(self, there: Reader, session: LakeSession, pause: Callable[[], None]) -> None:
        self._there, self._here, self._pause = there, InProcess(session), pause

    def read(
        self, reads: Sequence[SourceRead | LakeRead], keys: Mapping[int, pa.Array], done: Done
    ) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for read in reads:
            self._pause()
            reader = self._here if isinstance(read, LakeRead) else self._there
            [piece] = reader.read([read], keys, done).values()
            answers[read.part] = answers[read.part].plus(piece) if read.part in answers else piece
        return answers


class _Counts(AccumulatorParam[dict[int, int]]):
    def zero(self, value: dict[int, int]) -> dict[int, int]:
        return {}

    def addInPlace(self, value1: dict[int, int], value2: dict[int, int]) -> dict[int, int]:
        return {part: value1.get(part, 0) + value2.get(part, 0) for part in value1.keys() | value2.keys()}


class _Watch:
    """Reports progress while a job runs, and the remaining progress at its end."""

    def __init__(self, counts: Callable[[], dict[int, int]], done: Done) -> None:
        self._counts, self._done = counts, done
        self._told: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="verify-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._tell()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._tell()

    def _tell(self) -> None:
        for part, count in self._counts().items():
            if new := count - self._told.get(part, 0):
                self._told[part] = count
                self._done(part, new)
