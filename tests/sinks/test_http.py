"""The webhook: batches, retries with backoff, names of events, the dead-letter file."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aqueduck.config.events import HttpSinkConfig
from aqueduck.model.errors import ConfigError, SinkPathError, SinkRejectedError, SinkUnreachableError
from aqueduck.model.event_parts import EventPart
from aqueduck.sinks.http import HttpSink
from aqueduck.sinks.rows import SCHEMA
from tests.fix_events import Flow
from tests.fix_postgres import Database
from tests.tls_proxy import make_certificates


class Receiver:
    """A server with scripted answers; by default it accepts everything."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.bodies: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.answer = b""
        self.answered = 0
        self.connections: set[Any] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.bodies.append(body)
                receiver.connections.add(self.client_address)
                status = receiver.answers.pop(0) if receiver.answers else 200
                if status == 0:  # taken, but the answer never comes
                    receiver.requests.append((dict(self.headers), json.loads(body)))
                    self.close_connection = True
                    self.connection.close()
                    return
                if status < 300:
                    receiver.requests.append((dict(self.headers), json.loads(body)))
                self.send_response(status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(receiver.answer)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    for at in range(0, len(receiver.answer), 1 << 16):
                        self.wfile.write(receiver.answer[at : at + (1 << 16)])
                        receiver.answered += 1 << 16

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class's name
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hook?x=1"

    def events(self) -> list[Any]:
        return [event for _, body in self.requests for event in body]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def rows(directory: Path, events: list[tuple[int, int]]) -> EventPart:
    """A part of events that say what names them."""
    path = directory / "rows.part"
    lines = [json.dumps({"lsn": lsn, "seq": seq}).encode() + b"\n" for lsn, seq in events]
    table = [lines, [None] * len(events), [lsn for lsn, _ in events], [seq for _, seq in events]]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(table, SCHEMA, strict=True)], schema=SCHEMA
    )
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, SCHEMA) as writer:
        writer.write_batch(batch)
    return EventPart(0, str(path), len(events), path.stat().st_size)


def sink_of(receiver: Receiver, slept: list[float] | None = None, **options: Any) -> HttpSink:
    config = HttpSinkConfig(url=receiver.url, **options)
    return HttpSink(config, sleep=(slept if slept is not None else []).append)


EVENTS = [(0x1_0000_0010, 0), (0x1_0000_0010, 1), (0x1_0000_0010, 2), (0x1_0000_0020, 0), (0x1_0000_0020, 5)]


def test_events_are_posted_in_batches_with_what_names_them(receiver: Receiver, tmp_path: Path) -> None:
    """P-E10: JSON arrays in order; the LSN and index of each event are in a header, the same at every delivery."""
    sink = sink_of(receiver, batch_size=4, headers={"X-Token": "t"})
    for _ in range(2):
        sink.write([rows(tmp_path, EVENTS)], 1)
    assert [len(body) for _, body in receiver.requests] == [4, 1, 4, 1]
    assert [(e["lsn"], e["seq"]) for e in receiver.events()] == EVENTS * 2
    first, second, again, _ = (headers for headers, _ in receiver.requests)
    assert first["Aqueduck-Events"] == "1/10/0-2,1/20/0"
    assert first["Idempotency-Key"] == again["Idempotency-Key"] == "1/10/0..1/20/0"
    assert second["Idempotency-Key"] == "1/20/5..1/20/5"
    assert (first["X-Token"], first["Content-Type"]) == ("t", "application/json")


def test_what_fails_for_now_is_tried_again_with_backoff(receiver: Receiver, tmp_path: Path) -> None:
    """P-E10: after 5xx, 429 and lost answers the same batch is sent again with growing delays; nothing is left out."""
    slept: list[float] = []
    receiver.answers = [503, 429, 0, 200]
    sink_of(receiver, slept, backoff=0.5).write([rows(tmp_path, EVENTS)], 1)
    assert slept == [0.5, 1.0, 2.0]
    assert [(e["lsn"], e["seq"]) for e in receiver.events()] == EVENTS * 2, "the lost answer came again"
    keys = {headers["Idempotency-Key"] for headers, _ in receiver.requests}
    assert len(keys) == 1


def test_a_receiver_that_stays_down_is_a_typed_error(receiver: Receiver, tmp_path: Path) -> None:
    """The batch does not count as delivered, and the error says so without the URL's secrets."""
    receiver.answers = [500] * 9
    with pytest.raises(SinkUnreachableError, match="3 tries: status 500"):
        sink_of(receiver, retries=2).write([rows(tmp_path, EVENTS)], 1)
    receiver.server.shutdown()
    receiver.server.server_close()
    config = HttpSinkConfig(url=receiver.url.replace("http://", "http://user:hunter2@"), retries=1)
    with pytest.raises(SinkUnreachableError) as error:
        HttpSink(config, sleep=lambda _: None).write([rows(tmp_path, EVENTS)], 1)
    assert "hunter2" not in str(error.value)


def test_what_is_refused_is_put_aside(receiver: Receiver, tmp_path: Path) -> None:
    """P-E10: 4xx: into the dead-letter file with its reason and names, and the rest continues; without such a file it stops."""
    letters = tmp_path / "dead" / "letters.jsonl"
    receiver.answers = [400, 200]
    sink_of(receiver, batch_size=4, dead_letter_path=str(letters)).write([rows(tmp_path, EVENTS)], 1)
    [letter] = [json.loads(line) for line in letters.read_text().splitlines()]
    assert (letter["status"], letter["ids"]) == (400, ["1/10/0-2", "1/20/0"])
    assert [(e["lsn"], e["seq"]) for e in letter["events"]] == EVENTS[:4]
    assert [(e["lsn"], e["seq"]) for e in receiver.events()] == EVENTS[4:]
    receiver.answers = [422]
    with pytest.raises(SinkRejectedError, match="status 422"):
        sink_of(receiver).write([rows(tmp_path, EVENTS)], 1)
    receiver.answers = [400]
    with pytest.raises(SinkPathError, match="dead-letter"):
        sink_of(receiver, dead_letter_path=str(letters / "x")).write([rows(tmp_path, EVENTS)], 1)


def test_a_long_answer_is_not_read(receiver: Receiver, tmp_path: Path) -> None:
    """The attack: a receiver that answers without an end filled the memory; its answer ends with the connection."""
    receiver.answer = bytes(64 << 20)
    sink = sink_of(receiver, batch_size=4)
    sink.write([rows(tmp_path, EVENTS)], 1)
    sink.close()
    assert [(e["lsn"], e["seq"]) for e in receiver.events()] == EVENTS
    assert receiver.answered < 64 << 20


def test_requests_share_a_connection_and_nothing_else(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No cookie comes back, no proxy of the environment sees the events, and no library logs the URL."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    receiver.headers = {"Set-Cookie": "seen=1"}
    sink = sink_of(receiver, batch_size=1, retries=0)
    with caplog.at_level("INFO"):
        sink.write([rows(tmp_path, EVENTS)], 1)
    sink.close()
    assert len(receiver.requests) == len(EVENTS)
    assert len(receiver.connections) == 1
    assert not any("cookie" in map(str.lower, headers) for headers, _ in receiver.requests)
    assert receiver.url not in caplog.text


def test_a_connection_that_the_receiver_closed_costs_no_try(receiver: Receiver, tmp_path: Path) -> None:
    """After a pause the receiver may have closed the connection: the next batch takes another one."""
    receiver.headers = {"Connection": "close"}
    sink = sink_of(receiver, batch_size=1, retries=0)
    sink.write([rows(tmp_path, EVENTS)], 1)
    assert len(receiver.connections) == len(EVENTS)


@pytest.mark.parametrize(
    "wrong", [{"url": "http://hunter2@-\u00e4.example/x"}, {"headers": {"X-Token": "hunter2 \u20ac"}}]
)
def test_what_http_cannot_send_is_an_error_of_the_file(receiver: Receiver, wrong: dict[str, Any]) -> None:
    """The error names the keys and shows no value of them."""
    with pytest.raises(ConfigError, match=r"sink\.config\.url or a header") as caught:
        HttpSink(HttpSinkConfig(**{"url": receiver.url, **wrong}))
    assert "hunter2" not in str(caught.value)


def test_a_redirect_takes_no_events_elsewhere(receiver: Receiver, tmp_path: Path) -> None:
    """Neither body nor credentials go to another host; the answer counts as a refusal."""
    elsewhere = Receiver()
    receiver.answers = [307]
    receiver.headers = {"Location": elsewhere.url}
    with pytest.raises(SinkRejectedError, match="status 307"):
        sink_of(receiver, headers={"Authorization": "Bearer geheim"}).write([rows(tmp_path, EVENTS)], 1)
    elsewhere.server.shutdown()
    elsewhere.server.server_close()
    assert elsewhere.bodies == []


def test_a_receiver_can_tell_who_sent_a_body(receiver: Receiver, tmp_path: Path) -> None:
    """By the function of docs/events.md: another body, another time, another secret or an old request is refused."""
    document = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(import hashlib.*?)```", document, re.DOTALL)
    found: dict[str, Any] = {}
    exec(example, found)
    is_genuine = found["is_genuine"]
    sink_of(receiver, signature_secret="geheim", batch_size=500).write([rows(tmp_path, EVENTS)], 1)
    [body], [(headers, _)] = receiver.bodies, receiver.requests
    signature = headers["Aqueduck-Signature"]
    assert is_genuine("geheim", signature, body)
    assert not is_genuine("geheim", signature, body + b" ")
    assert not is_genuine("another", signature, body)
    assert not is_genuine("geheim", re.sub(r"t=\d", "t=9", signature), body)
    assert not is_genuine("geheim", signature, body, seconds=-1)
    assert "geheim" not in repr(HttpSinkConfig(url=receiver.url, signature_secret="geheim"))


def test_receiver_and_sink_know_each_other_by_certificates(receiver: Receiver, tmp_path: Path) -> None:
    """An authority of one's own is enough for the receiver, and a client certificate for a receiver that wants one."""
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        folder.mkdir()
    mine, foreign = make_certificates(ours, "127.0.0.1"), make_certificates(others, "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(mine.authority))
    context.load_cert_chain(mine.server)
    context.verify_mode = ssl.CERT_REQUIRED
    receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)

    def send(**options: Any) -> None:
        config = HttpSinkConfig(url=receiver.url.replace("http:", "https:"), retries=0, **options)
        sink = HttpSink(config, sleep=lambda _: None)
        sink.write([rows(tmp_path, EVENTS)], 1)
        sink.close()

    certificate = {"client_cert": str(mine.server)}
    for options in (
        certificate,
        {"ca_path": str(foreign.authority), **certificate},
        {"ca_path": str(mine.authority)},
    ):
        with pytest.raises(SinkUnreachableError):
            send(**options)
    assert receiver.bodies == []
    send(ca_path=str(mine.authority), **certificate)
    assert [(e["lsn"], e["seq"]) for e in receiver.events()] == EVENTS
    for wrong in (str(tmp_path / "none.pem"), str(mine.authority)):
        with pytest.raises(ConfigError, match="client_cert or client_key"):
            send(ca_path=str(mine.authority), client_cert=wrong)


@pytest.mark.kills("events", "sink.posted")
def test_a_flow_to_a_webhook_that_fails_now_and_then(
    db: Database, flow_of: Callable[..., Flow], receiver: Receiver
) -> None:
    """P-E03: a kill in the middle of a batch; at least once, repeated events keep their names, order is kept."""
    db.execute("create table t (id int primary key); create publication faucet_pub for table t")
    sink = {"type": "http", "config": {"url": receiver.url, "batch_size": 7, "backoff": 0.01}}
    flow = flow_of(sink=sink)
    assert flow.once() == 0, flow.log()
    for i in range(10):
        db.execute(f"insert into t select {i * 10} + g from generate_series(1, 10) g")
    receiver.answers = [200, 500, 200, 0]
    assert flow.once(fault="sink.posted:5") == -9, flow.log()
    before = len(receiver.requests)
    assert flow.once() == 0, flow.log()
    ids = [event["after"]["id"] for event in receiver.events()]
    assert sorted(set(ids)) == list(range(1, 101))
    assert ids[-100:] == list(range(1, 101)), "the batch came again from its beginning"
    names = [headers["Idempotency-Key"] for headers, _ in receiver.requests]
    assert set(names[:before]) <= set(names[before:])
