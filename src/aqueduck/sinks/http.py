"""
A webhook: batches of events as JSON arrays, tried again with backoff, put aside where they are refused.

At least once.  `Idempotency-Key` names the batch by its first and last event, `Aqueduck-Events` every event in it by
the LSN of its transaction and its index there; both are the same when a batch or an event comes again.  With a secret,
`Aqueduck-Signature` proves who sent a body and when.  Redirects are not followed: they would take the events elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import structlog

from aqueduck import faults
from aqueduck.config.events import HttpSinkConfig
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import (
    ConfigError,
    SinkPathError,
    SinkRejectedError,
    SinkUnreachableError,
    system_reason,
)
from aqueduck.model.event_parts import EventPart, PartFormat
from aqueduck.sinks.rows import EventBatch, event_batches

__all__ = ["HttpSink"]

log = structlog.get_logger()

BACKOFF_SECONDS_MAX = 30.0
ANSWER_BYTES_MAX = 64 << 10
"""Of an answer nothing is used but its status; one that is longer costs its connection."""
# Answers that say "later", besides those from 500 on.
_LATER = (408, 425, 429)


class HttpSink:
    """Posts to one URL over one connection that is kept open."""

    part_format: PartFormat = "rows"
    batch_bytes_max: int | None = 16 << 20

    def __init__(self, config: HttpSinkConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._url = urlsplit(config.url)
        self._target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        self._connection: http.client.HTTPConnection | None = None
        self._headers = {"Content-Type": "application/json", "User-Agent": "aqueduck"}
        if self._url.username:
            login = f"{unquote(self._url.username)}:{unquote(self._url.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._headers |= config.headers
        self._tls = _tls(config) if self._url.scheme == "https" else None

    def recover(self, bookmark: Bookmark | None) -> None: ...

    def place(self) -> dict[str, Any]:
        return {}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        for part in parts:
            for batch in event_batches(Path(part.path), self._config.batch_size):
                self._deliver(batch)
                faults.point("sink.posted")

    def _deliver(self, batch: EventBatch) -> None:
        delay = self._config.backoff
        for attempt in range(self._config.retries + 1):
            status, reason = self._post(batch)
            if status is not None and 200 <= status < 300:
                return
            if status is not None and status < 500 and status not in _LATER:
                self._put_aside(batch, status)
                return
            if attempt < self._config.retries:
                log.warning("webhook failed, trying again", reason=reason, attempt=attempt + 1)
                self._sleep(min(delay, BACKOFF_SECONDS_MAX))
                delay *= 2
        raise SinkUnreachableError(
            f"the webhook did not take a batch in {self._config.retries + 1} tries: {reason}",
            hint="check that the receiver runs; the batch is delivered again from its beginning",
        )

    def _post(self, batch: EventBatch) -> tuple[int | None, str]:
        ids = batch.ids()
        headers = {
            **self._headers,
            "Idempotency-Key": f"{ids[0].split('-')[0]}..{_last(ids[-1])}",
            "Aqueduck-Events": ",".join(ids),
        }
        body = batch.as_array()
        if self._config.signature_secret is not None:
            headers["Aqueduck-Signature"] = _signature(self._config.signature_secret, int(time.time()), body)
        try:
            connection = self._connected()
            connection.request("POST", self._target, body, headers)
            response = connection.getresponse()
            if not _read_up(response, time.monotonic() + self._config.timeout):
                self.close()
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            return None, type(exc).__name__
        return response.status, f"status {response.status}"

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port, timeout = self._url.hostname, self._url.port, self._config.timeout
            assert host is not None
            if self._tls is not None:
                self._connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        return self._connection

    def _put_aside(self, batch: EventBatch, status: int) -> None:
        """A batch that the receiver will never take: into the dead-letter file, or nowhere and stop."""
        path = self._config.dead_letter_path
        if path is None:
            raise SinkRejectedError(
                f"the webhook refused a batch with status {status}",
                hint="correct the receiver, or set sink.config.dead_letter_path to put such batches aside",
            )
        record = {"status": status, "ids": batch.ids(), "time": time.time()}
        line = json.dumps(record)[:-1].encode() + b', "events": ' + batch.as_array() + b"}\n"
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as out:
                out.write(line)
                out.flush()
                os.fsync(out.fileno())
        except OSError as exc:
            raise SinkPathError(f"the dead-letter file cannot be written: {system_reason(exc)}") from exc
        log.warning("webhook refused a batch, put aside", status=status, events=len(batch.lsn))

    def tick(self, position: int, *, final: bool = False) -> bool:
        return False

    def settle(self, position: int) -> None: ...

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None


def _tls(config: HttpSinkConfig) -> ssl.SSLContext:
    """Who the receiver has to be, and who we are."""
    try:
        context = ssl.create_default_context(cafile=config.ca_path)
        if config.client_cert is not None:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(config.client_cert, config.client_key, password="")
    except OSError as exc:  # ssl.SSLError is one
        what = (
            "is no certificate, or no key that fits it"
            if isinstance(exc, ssl.SSLError)
            else system_reason(exc)
        )
        raise ConfigError(
            f"a file of sink.config.ca_path, client_cert or client_key cannot be used: {what}",
            hint="they are PEM files that this user can read; the key has no password",
        ) from None
    return context


def _signature(secret: str, at: int, body: bytes) -> str:
    """When, and a hash over that and the body that only those who know the secret can make."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},sha256={digest}"


def _read_up(response: http.client.HTTPResponse, deadline: float) -> bool:
    """Whether an answer ends soon, so that its connection can take another request."""
    left = ANSWER_BYTES_MAX
    while left > 0 and time.monotonic() < deadline:
        chunk = response.read1(left)
        if not chunk:
            response.close()
            return True
        left -= len(chunk)
    return False


def _last(run: str) -> str:
    """The last event of a run such as `0/16A4F88/3-7`."""
    head, _, last = run.partition("-")
    return f"{head.rpartition('/')[0]}/{last}" if last else head
