"""Readers that `capture: auto` changes as often as it can: in a moment it has read in bulk, in the next it streams."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduck.postgres.capture import catchup

SETTINGS: dict[str, Any] = {"capture": "auto", "catchup_bytes": 1, "poll_step_bytes": 64 << 10}


def make_restless(monkeypatch: pytest.MonkeyPatch, *, leaves_large: bool = True) -> dict[str, Any]:
    """The settings of such a capture; without `leaves_large`, it reads large transactions in bulk, step by step from their beginning."""
    monkeypatch.setattr(catchup, "NEAR_BYTES", 1)
    monkeypatch.setattr(catchup.Catchup, "is_due", lambda *_: True)
    monkeypatch.setattr(catchup, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(catchup, "PAUSE_FACTOR", 0)
    monkeypatch.setattr(catchup, "REST_FACTOR", 0)
    if not leaves_large:
        monkeypatch.setattr(catchup, "OPEN_SHARE", -1)
        monkeypatch.setattr(catchup, "EMPTY_STEPS", 1 << 30)
        monkeypatch.setattr(catchup, "FAR_FACTOR", 1 << 40)
    return SETTINGS
