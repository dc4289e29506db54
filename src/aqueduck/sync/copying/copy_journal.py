"""
The journal of one table's copy: which chunks are done, and under which snapshot each was read.

An interrupted copy continues with the missing chunks under a new snapshot: a new *session*.  The journal is in the
group's directory and only saves work: if it is missing, or if the table was rewritten or its columns changed, the copy
starts over.  It relies on the changes that were parked since its first session; code that deletes those, or that starts
a table anew, calls `forget_journal`.  Tasks add a file for each chunk that is safely on disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.model.schema import TableSchema
from aqueduck.model.visibility import Visibility
from aqueduck.postgres.copy.table_copy import Chunk
from aqueduck.state_files.files import replace_file

__all__ = ["CopyJournal", "CopySession", "forget_journal", "journaled_files", "journals_of"]


@dataclass(frozen=True, slots=True)
class CopySession:
    """One attempt: position and time of its snapshot, and the oldest transaction that the snapshot does not show."""

    number: int
    position: int
    xmin: int
    time_us: int = 0
    xmax: int | None = None
    running: tuple[int, ...] = ()

    @property
    def visibility(self) -> Visibility:
        """What its snapshot shows."""
        return Visibility(self.position, self.xmax, tuple(self.running))


class CopyJournal:
    """`begin` a session, copy `missing` and `rescans`, and `clear` it when the copy is committed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.chunks: tuple[Chunk, ...] = ()
        self.sessions: list[CopySession] = []
        self.columns: dict[int, int] = {}

    @property
    def rows(self) -> Path:
        """The directory of the chunks' files if they must not be in the lake; deleted with the journal."""
        return self.directory / "rows"

    def begin(
        self,
        schema: TableSchema,
        place: str,
        chunks: Sequence[Chunk],
        *,
        columns: Mapping[int, int],
        visibility: Visibility,
        xmin: int,
        time_us: int = 0,
    ) -> CopySession:
        """Continue the existing journal if it fits the table as it is now (`chunks`, marks of its `columns`); otherwise start over."""
        self.columns = dict(columns)
        # Without a key, the rows of two snapshots cannot be combined.
        if not schema.key or not self._go_on(schema, place, chunks):
            self.clear()
            self.directory.mkdir(parents=True)
            self.chunks = tuple(replace(c, number=n) for n, c in enumerate(chunks))
        session = CopySession(
            len(self.sessions), visibility.position, xmin, time_us, visibility.xmax, visibility.running
        )
        self.sessions.append(session)
        plan = {
            "schema": schema.to_json(),
            "place": place,
            "columns": list(self.columns.items()),
            "chunks": [asdict(c) for c in self.chunks],
            "sessions": [asdict(s) for s in self.sessions],
        }
        replace_file(self._plan, json.dumps(plan), sync=True)
        return session

    def _go_on(self, schema: TableSchema, place: str, now: Sequence[Chunk]) -> bool:
        try:
            plan = json.loads(self._plan.read_text())
            old = [Chunk(**values) for values in plan["chunks"]]
            sessions = [CopySession(**values) for values in plan["sessions"]]
            columns = dict(plan["columns"])
        except (OSError, ValueError, TypeError, KeyError):
            return False
        relations = {c.relation: c for c in now}
        known = {c.relation: c.filenode for c in old}
        same = all(r in relations and relations[r].filenode == node for r, node in known.items())
        if not same or plan["schema"] != schema.to_json() or plan["place"] != place:
            return False
        if columns != self.columns:
            return False
        # The table may have been renamed, and partitions may have been added.
        kept = [
            replace(c, schema=relations[c.relation].schema, table=relations[c.relation].table) for c in old
        ]
        new = [c for c in now if c.relation not in known]
        self.chunks = tuple(replace(c, number=n) for n, c in enumerate([*kept, *new]))
        self.sessions = sessions
        return bool(self.done())

    @property
    def _plan(self) -> Path:
        return self.directory / "plan.json"

    def chunk_path(self, chunk: int, session: CopySession) -> Path:
        """The file that a task writes when a chunk is done."""
        return self.directory / f"chunk-{chunk}-{session.number}.json"

    def done(self) -> dict[int, tuple[int, ChunkFile]]:
        """Finished chunks: session and file, by number."""
        found: dict[int, tuple[int, ChunkFile]] = {}
        for path in sorted(self.directory.glob("chunk-*.json")):
            _, number, session = path.stem.split("-")
            try:
                file = ChunkFile.from_json(path.read_text())
            except FileNotFoundError:  # the copy has just ended
                continue
            if all(Path(path).exists() or "://" in path for path in file.paths):
                found[int(number)] = (int(session), file)
        return found

    def missing(self) -> list[Chunk]:
        done = self.done()
        return [c for c in self.chunks if c.number not in done]

    def rescans(self) -> list[Chunk]:
        """Chunks that an earlier session read; they are scanned again for rows that are newer."""
        last = len(self.sessions) - 1
        return [
            replace(self.chunks[number], since=self.sessions[session].xmin)
            for number, (session, _) in self.done().items()
            if session < last
        ]

    def files_by_session(self) -> list[list[ChunkFile]]:
        files: list[list[ChunkFile]] = [[] for _ in self.sessions]
        for session, file in self.done().values():
            files[session].append(file)
        return files

    def clear(self) -> None:
        """Delete the journal; files that no catalog knows become orphans."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.chunks, self.sessions = (), []


def forget_journal(group_directory: Path, oid: int) -> None:
    """Make the next copy of the table start over."""
    CopyJournal(journals_of(group_directory) / str(oid)).clear()


def journals_of(group_directory: Path) -> Path:
    """The directory of a group's copy journals."""
    return group_directory / "copies"


def journaled_files(directories: Iterable[Path]) -> set[str]:
    """Names of data files that a journal still needs."""
    names: set[str] = set()
    for directory in directories:
        for _, file in CopyJournal(directory).done().values():
            names.update(path.rsplit("/", 1)[-1] for path in file.paths)
    return names
