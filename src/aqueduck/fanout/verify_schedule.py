"""
Scheduled comparison of a running fan-out's destinations, and the reaction to a difference.

A separate engine reads the lakes: one low-priority thread and a quarter of a gigabyte, beside the lanes. A
destination whose own rows differ is re-seeded, unless the file says to report only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aqueduck.config.lake_place import resolve
from aqueduck.fanout.status import FLOW
from aqueduck.fanout.verdicts import DestinationComparison
from aqueduck.fanout.verify import compare_sums
from aqueduck.fanout.verify_deep import WAVE, compare_deeply
from aqueduck.lake.session.pool import LakePool
from aqueduck.model.errors import AqueduckError, LakeTableMissingError, TargetReplacedError
from aqueduck.overview.verification import Look
from aqueduck.service.verify_schedule import Verifier

if TYPE_CHECKING:  # the service starts the verifier
    from aqueduck.fanout.service import FanoutService

__all__ = ["fanout_verifier"]

MEMORY = "256MB"


def fanout_verifier(service: FanoutService) -> Verifier:
    """The verifier of a fan-out."""
    config = service.config.verify

    def subjects() -> list[str]:
        return [one.destination.id for one in service.served]

    def busy() -> str | None:
        status = service.status
        if status.source_error is not None:
            return "the source cannot be read"
        if status.seed is not None:
            return "destinations are being seeded"
        # A failed destination stays behind until it is repaired; the others are compared meanwhile.
        moving = [d for d in list(status.destinations.values()) if d.state != "errored"]
        lag = max((d.lag_seconds for d in moving), default=0.0)
        return None if lag <= config.pause_lag_seconds else f"a destination is {lag:.0f} s behind"

    def differing(name: str, look: Look) -> None:
        if look.heals and config.on_difference == "reseed":
            service.reseed_wanted.add(name)

    verifier = Verifier(
        FLOW,
        config,
        service.verdicts,
        subjects,
        lambda names: _look(service, names, verifier),
        busy,
        at_once=WAVE,
        differing=differing,
    )
    return verifier


def _look(service: FanoutService, names: Sequence[str], verifier: Verifier) -> Mapping[str, Look]:
    config = service.config
    mine = [one.destination for one in service.served if one.destination.id in set(names)]
    source = resolve(config.source, {}, service.env)

    def progress(_name: str, _doing: str, _share: float) -> None:
        verifier.pause()

    pool = LakePool(max_open=2, threads=1, memory_limit=MEMORY)
    try:
        if config.verify.deep:
            found = compare_deeply(pool, config, source, mine, service.served.values, progress, threads=1)
        else:
            found = compare_sums(pool, config, source, mine, progress, threads=1)
    finally:
        pool.close()
    if config.verify.on_difference == "reseed":
        service.reseed_wanted.update(each.destination for each in found if _lost_its_table(each))
    return {each.destination: _as_look(each) for each in found}


def _lost_its_table(found: DestinationComparison) -> bool:
    error = AqueduckError.from_text(found.note or "")
    return found.verdict == "not compared" and isinstance(error, LakeTableMissingError | TargetReplacedError)


def _as_look(found: DestinationComparison) -> Look:
    foreign = 0 if found.deep is None else found.deep.foreign
    return Look(
        verdict=found.verdict,
        differences=found.differing,
        note=found.note,
        heals=found.differing > foreign,
    )
