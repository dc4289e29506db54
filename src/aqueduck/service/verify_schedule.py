"""
Scheduled comparison in the service: a thread that has a subject compared, records the verdict, and rests.

The flow defines the subjects and the comparison (`sync.verify_schedule`, `fanout.verify_schedule`);
`overview.verification` decides when one is due. Verdicts are stored in a file of `state_dir`, so that a
restart does not repeat comparisons. A difference counts once a second comparison confirms it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from aqueduck.config.sync import VerifyConfig
from aqueduck.model.errors import VerifyPostponedError, own_error
from aqueduck.overview import metrics
from aqueduck.overview.values import VerificationOverview, VerifyOverview, to_plain
from aqueduck.overview.verification import NEVER, Look, after, due, rest_seconds
from aqueduck.state_files.files import replace_file

__all__ = ["Verdicts", "Verifier", "summary"]

log = structlog.get_logger()

FIRST_SECONDS = 600.0
"""No comparison starts this soon after a start, when there is other work."""
TURN_SECONDS = 1.0
NICE = 10
_TIMES = ("at", "identical_at", "failed_at")


class Verdicts:
    """The record of each subject, by name, stored in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)

    def __getitem__(self, name: str) -> VerifyOverview:
        return self._known.get(name, NEVER)

    def all(self) -> Mapping[str, VerifyOverview]:
        return self._known

    def record(self, found: Mapping[str, VerifyOverview], subjects: Sequence[str]) -> None:
        """Record the findings, and drop subjects that no longer exist."""
        known = {**self._known, **found}
        self._known = {name: known[name] for name in subjects if name in known}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps({name: to_plain(v) for name, v in self._known.items()}))
        except OSError as exc:
            log.warning("the verdicts cannot be written", reason=exc.strerror)


def _read(path: Path) -> dict[str, VerifyOverview]:
    """Read the file; if it is missing or damaged, everything is compared again."""
    try:
        return {name: _verdict(values) for name, values in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _verdict(values: dict[str, Any]) -> VerifyOverview:
    times = {name: datetime.fromisoformat(values[name]) for name in _TIMES if values.get(name)}
    return VerifyOverview(**{**values, **times})


def summary(
    config: VerifyConfig, known: Sequence[VerifyOverview], doing: tuple[str, ...]
) -> VerificationOverview | None:
    """All subjects of a flow; None if the service compares nothing."""
    if config.interval is None:
        return None
    times = [v.identical_at for v in known if v.identical_at is not None]
    return VerificationOverview(
        interval_seconds=config.interval,
        deep=config.deep,
        identical=sum(v.verdict == "identical" for v in known),
        different=sum(v.verdict == "different" for v in known),
        never=sum(v.verdict == "never" for v in known),
        oldest_at=min(times) if times and len(times) == len(known) else None,
        doing=doing,
    )


class Verifier:
    """The comparison thread; `look` compares some subjects, at most `at_once` of them."""

    def __init__(
        self,
        flow: str,
        config: VerifyConfig,
        verdicts: Verdicts,
        subjects: Callable[[], list[str]],
        look: Callable[[Sequence[str]], Mapping[str, Look]],
        busy: Callable[[], str | None],
        *,
        at_once: int = 1,
        differing: Callable[[str, Look], None] = lambda _name, _look: None,
    ) -> None:
        self._flow, self._config, self._verdicts = flow, config, verdicts
        self._subjects, self._look, self._busy = subjects, look, busy
        self._at_once, self._differing = at_once, differing
        self._stopping = threading.Event()
        self._free_at = time.monotonic() + min(FIRST_SECONDS, config.interval or 0.0)
        self._thread = threading.Thread(target=self._loop, name="verify", daemon=True)
        self.doing: tuple[str, ...] = ()
        """What is being compared now."""

    def start(self) -> None:
        """Start the thread, unless the interval is off."""
        if self._config.interval is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a comparison that is running is abandoned without a verdict."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def pause(self) -> None:
        """Called between pieces of a comparison; raises if the flow needs the machine, or ends."""
        reason = "the service ends" if self._stopping.is_set() else self._busy()
        if reason is not None:
            raise VerifyPostponedError(f"the comparison was stopped: {reason}")

    def _loop(self) -> None:
        with contextlib.suppress(OSError):  # only Linux has priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.wait(TURN_SECONDS):
            if time.monotonic() >= self._free_at and self._busy() is None:
                self.turn()

    def turn(self) -> bool:
        """Compare what is due, if anything."""
        now, subjects = datetime.now(UTC), self._subjects()
        names = due(self._verdicts.all(), subjects, self._config.interval or 0.0, now, self._at_once)
        if not names:
            return False
        began = time.monotonic()
        self.doing = tuple(names)
        try:
            found = self._looked_at_twice(names)
        finally:
            self.doing = ()
        seconds = time.monotonic() - began
        self._free_at = time.monotonic() + rest_seconds(seconds, self._config.share)
        if not self._stopping.is_set():
            self._record(found, subjects, seconds)
        return True

    def _looked_at_twice(self, names: Sequence[str]) -> dict[str, Look]:
        found = self._safely(names)
        differing = [name for name, look in found.items() if look.verdict == "different"]
        return {**found, **self._safely(differing)} if differing else found

    def _safely(self, names: Sequence[str]) -> dict[str, Look]:
        """Compare each subject and catch all errors: a failed one counts as not compared."""
        missing = Look(verdict="not compared", note="there is no result yet")
        try:
            found = self._look(names)
        except Exception as exc:  # noqa: BLE001 - the thread continues, and reports why it could not compare
            found, missing = {}, Look(verdict="not compared", note=str(own_error(exc)))
        return {name: found.get(name, missing) for name in names}

    def _record(self, found: Mapping[str, Look], subjects: Sequence[str], seconds: float) -> None:
        now = datetime.now(UTC)
        known = {name: self._verdicts[name].failure for name in found}
        self._verdicts.record(
            {
                name: after(self._verdicts[name], look, now, deep=self._config.deep)
                for name, look in found.items()
            },
            subjects,
        )
        metrics.observe_verify(
            self._flow, seconds=seconds, verdicts=[look.verdict for look in found.values()]
        )
        for name, look in found.items():
            if look.verdict == "different":
                log.error("verified: different", subject=name, differences=look.differences, note=look.note)
                self._differing(name, look)
            elif look.verdict == "not compared" and look.note != known[name]:
                log.warning("could not be verified", subject=name, reason=look.note)
        same = sum(look.verdict == "identical" for look in found.values())
        log.info("verified", identical=same, of=len(found), seconds=round(seconds, 2))
