"""
A webhook: posts batches of events as JSON arrays, retries with backoff, and sets refused batches aside.

Delivery is at least once.  `Idempotency-Key` names the batch by its first and last event; `Aqueduck-Events` names every
event by the LSN of its transaction and its index there.  Both are the same when a batch or an event is repeated.  With a
secret, `Aqueduck-Signature` proves the sender and the time of a body.  Redirects are not followed, because they would send
the events elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
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
from aqueduck.model.retries import doubling, retried
from aqueduck.sinks.rows import EventBatch, event_batches

__all__ = ["HttpSink"]

log = structlog.get_logger()

BACKOFF_SECONDS_MAX = 30.0
ANSWER_BYTES_MAX = 64 << 10
"""Only the status of a response is used; if its body is longer than this, the connection is closed."""
# Statuses that ask for a retry, besides those from 500 on.
_LATER = (408, 425, 429)


class _LaterError(Exception):
    """The receiver cannot accept the batch now; the text has the reason."""


class HttpSink:
    """
    Posts to one URL over one persistent connection.

    It uses a transport of httpx without a client: no redirects, cookies, proxies of the environment or logged URLs.
    """

    part_format: PartFormat = "rows"
    batch_bytes_max: int | None = 16 << 20

    def __init__(self, config: HttpSinkConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._sleep = sleep
        try:
            self._url = httpx.URL(config.url)
            headers = httpx.Headers(config.headers, encoding="latin-1")
        except (httpx.InvalidURL, UnicodeEncodeError):  # the text of either shows what may be secret
            raise ConfigError(
                "sink.config.url or a header of the webhook cannot be sent",
                hint="write the URL as https://host:port/path, and headers without letters beyond ISO 8859-1",
            ) from None
        self._headers = httpx.Headers({"Content-Type": "application/json", "User-Agent": "aqueduck"})
        if self._url.username:
            login = f"{self._url.username}:{self._url.password}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._headers.update(headers)
        self._transport = httpx.HTTPTransport(
            verify=_tls(config) if self._url.scheme == "https" else False,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None),
        )

    def recover(self, bookmark: Bookmark | None) -> None: ...

    def place(self) -> dict[str, Any]:
        return {}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        for part in parts:
            for batch in event_batches(Path(part.path), self._config.batch_size):
                self._deliver(batch)
                faults.point("sink.posted")

    def _deliver(self, batch: EventBatch) -> None:
        delays = doubling(self._config.backoff, BACKOFF_SECONDS_MAX, times=self._config.retries)
        tries = itertools.count(1)

        def warn(exc: Exception) -> None:
            log.warning("webhook failed, trying again", reason=str(exc), attempt=next(tries))

        try:
            status = retried(lambda: self._post(batch), delays, self._sleep, on=_LaterError, failed=warn)
        except _LaterError as exc:
            raise SinkUnreachableError(
                f"the webhook did not accept a batch in {self._config.retries + 1} tries: {exc}",
                hint="check that the receiver runs; the whole batch is then delivered again",
            ) from exc
        if not 200 <= status < 300:
            self._put_aside(batch, status)

    def _post(self, batch: EventBatch) -> int:
        """Post the batch and return the status; raises if a retry may succeed."""
        ids = batch.ids()
        headers = self._headers.copy()
        headers["Idempotency-Key"] = f"{ids[0].split('-')[0]}..{_last(ids[-1])}"
        headers["Aqueduck-Events"] = ",".join(ids)
        body = batch.as_array()
        if self._config.signature_secret is not None:
            headers["Aqueduck-Signature"] = _signature(self._config.signature_secret, int(time.time()), body)
        timeout = {"timeout": httpx.Timeout(self._config.timeout).as_dict()}
        request = httpx.Request("POST", self._url, headers=headers, content=body, extensions=timeout)
        try:
            with contextlib.closing(self._transport.handle_request(request)) as response:
                _read_up(response, time.monotonic() + self._config.timeout)
        except httpx.TransportError as exc:
            raise _LaterError(type(_root(exc)).__name__) from exc
        status = response.status_code
        if status >= 500 or status in _LATER:
            raise _LaterError(f"status {status}")
        return status

    def _put_aside(self, batch: EventBatch, status: int) -> None:
        """Write a batch that the receiver will never accept to the dead-letter file; without one, raise."""
        path = self._config.dead_letter_path
        if path is None:
            raise SinkRejectedError(
                f"the webhook refused a batch with status {status}",
                hint="correct the receiver, or set sink.config.dead_letter_path to set such batches aside",
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
        log.warning("webhook refused a batch, set it aside", status=status, events=len(batch.lsn))

    def tick(self, position: int, *, final: bool = False) -> bool:
        return False

    def settle(self, position: int) -> None: ...

    def close(self) -> None:
        self._transport.close()


def _tls(config: HttpSinkConfig) -> ssl.SSLContext:
    """The CA that verifies the receiver, and our client certificate."""
    try:
        context = ssl.create_default_context(cafile=config.ca_path)
        if config.client_cert is not None:
            # Without this password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(config.client_cert, config.client_key, password="")
    except OSError as exc:  # includes ssl.SSLError
        what = (
            "is not a certificate, or the key does not match it"
            if isinstance(exc, ssl.SSLError)
            else system_reason(exc)
        )
        raise ConfigError(
            f"a file of sink.config.ca_path, client_cert or client_key cannot be used: {what}",
            hint="they must be PEM files that this user can read, and the key must not have a password",
        ) from None
    return context


def _signature(secret: str, at: int, body: bytes) -> str:
    """The time, and a hash over time and body that requires the secret."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},sha256={digest}"


def _read_up(response: httpx.Response, deadline: float) -> None:
    """Read a short response completely, so that its connection can be reused; otherwise the connection is closed."""
    left = ANSWER_BYTES_MAX
    for chunk in response.iter_raw():
        left -= len(chunk)
        if left <= 0 or time.monotonic() >= deadline:
            return


def _root(exc: BaseException) -> BaseException:
    """The innermost cause below the errors of httpx and httpcore, which is the most specific."""
    return exc if exc.__cause__ is None else _root(exc.__cause__)


def _last(run: str) -> str:
    """The last event of a range such as `0/16A4F88/3-7`."""
    head, _, last = run.partition("-")
    return f"{head.rpartition('/')[0]}/{last}" if last else head
