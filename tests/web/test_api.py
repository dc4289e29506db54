"""The API reports the state, carries out requests, and refuses bad ones in JSON (P-S27)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.model.errors import ConfigError, SourceUnreachableError, TableMissingError
from aqueduck.overview.values import to_plain
from aqueduck.sync.actions import RegistryActions
from tests.web.conftest import TOKEN, Client
from tests.web.made_up import FULL, Stage

READING = [
    "status",
    "flows",
    "groups",
    "tables",
    "destinations",
    "lake",
    "errors",
    "settings",
    "openapi.json",
]
P_S27 = {
    "group", "source", "target", "state", "enabled", "rows_synced", "queued_changes", "queued_bytes",
    "last_sync_at", "error", "failures", "retry_at", "applied_lsn", "lag_bytes", "lag_seconds", "copy",
}  # fmt: skip


def test_health_is_alive(client: Client) -> None:
    """A process that answers is alive."""
    assert client.get("/healthz").json["status"] == "ok"


@pytest.mark.parametrize("what", READING)
def test_everything_can_be_read(client: Client, what: str) -> None:
    """Each part of the API answers in JSON."""
    answer = client.get(f"/api/v1/{what}")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json


def test_status_is_the_overview(client: Client) -> None:
    """The API returns the service's state, field by field."""
    expected = json.loads(json.dumps(to_plain(FULL)))
    answer = client.get("/api/v1/status").json
    assert {**answer, "at": None} == {**expected, "at": None}


def test_a_table_has_the_promised_columns(client: Client) -> None:
    """P-S27: state, rows, queue, error, failures, retry time, position, lag and copy of a table."""
    broken = client.get("/api/v1/tables/public.prices").json
    assert set(broken) >= P_S27
    assert (broken["state"], broken["failures"], broken["error"]["code"]) == ("ERRORED", 3, "lake.value")
    copying = client.get("/api/v1/tables?state=SNAPSHOT").json["tables"]
    assert [(t["source"], t["copy"]["share"]) for t in copying] == [("public.items", 0.41)]


def test_lists_can_be_narrowed(client: Client) -> None:
    """Filters and pages of the lists return exactly the matching entries."""
    assert client.get("/api/v1/tables?group=nobody").json["tables"] == []
    assert len(client.get("/api/v1/tables?group=shop").json["tables"]) == 3
    page = client.get("/api/v1/destinations?limit=1&offset=1").json
    assert (page["total"], [d["name"] for d in page["destinations"]]) == (2, ["bolt"])
    assert client.get("/api/v1/destinations?state=live&flow=tenants").json["total"] == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "call"),
    [
        ("POST", "/groups", {"name": "fast"},
         ("create_group", {0: "fast", "publication": None, "slot_name": None, "capture": None})),
        ("DELETE", "/groups/fast?with_tables=true", None, ("drop_group", {0: "fast", "with_tables": True})),
        ("POST", "/groups/fast/enable", None, ("enable_group", {0: "fast"})),
        ("POST", "/groups/fast/disable", {}, ("disable_group", {0: "fast"})),
        ("POST", "/tables", {"source": "public.a", "group": "fast", "copy": False, "mode": "history", "source_column": "c"},
         ("add_table", {0: "public.a", "target": None, "group_name": "fast", "mode": "history", "copy": False,
                        "source_column": "c", "source_value": None, "options": {}})),
        ("DELETE", "/tables/public.a?drop_target=true", None,
         ("remove_table", {0: "public.a", "drop_target": True, "group_name": None})),
        ("POST", "/tables/%22My%20Schema%22.%22a%2Fb%22/resync", None,
         ("resync_table", {0: '"My Schema"."a/b"', "group_name": None})),
        ("POST", "/tables/public.a/retry?group=fast", None, ("retry_table", {0: "public.a", "group_name": "fast"})),
        ("POST", "/tables/public.a/move", {"group": "fast"},
         ("move_table", {0: "public.a", 1: "fast", "from_group": None})),
        ("PUT", "/settings/flush_interval_ms", {"value": 500, "group": "fast"},
         ("set_setting", {0: "flush_interval_ms", 1: "500", "group_name": "fast", "source": None})),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_done_once(
    client: Client, method: str, path: str, body: Any, call: tuple[str, dict[Any, Any]]
) -> None:
    """Every request that changes something becomes exactly one call of the same functions as SQL has."""
    answer = client.ask(method, f"/api/v1{path}", body, token=TOKEN)
    assert answer.status == 202, answer.body
    assert answer.json["message"]
    assert client.stage.calls == [call]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "word"),
    [
        ("GET", "/nowhere", None, 404, "http.not_found", "address"),
        ("GET", "/api/v1/status/", None, 404, "http.not_found", "address"),
        ("GET", "/docs", None, 404, "http.not_found", "address"),
        ("GET", "/redoc", None, 404, "http.not_found", "address"),
        ("GET", "/api/v1/groups/nobody", None, 404, "http.not_found", "group"),
        ("GET", "/api/v1/tables/public.nobody", None, 404, "http.not_found", "table"),
        ("DELETE", "/api/v1/status", None, 405, "http.method", "DELETE"),
        ("POST", "/healthz", None, 405, "http.method", "POST"),
        ("PATCH", "/api/v1/groups", None, 405, "http.method", "PATCH"),
        ("DELETE", "/api/v1/tables/a/resync", None, 405, "http.method", "DELETE"),
        ("BREW", "/api/v1/groups", None, 405, "http.method", "BREW"),
        ("GET", "/api/v1/status?deep=1", None, 400, "http.request", "deep"),
        ("GET", "/api/v1/tables?state=FINE", None, 400, "http.request", "state"),
        ("GET", "/api/v1/errors?limit=many", None, 400, "http.request", "limit"),
        ("DELETE", "/api/v1/groups/a?name=b", None, 400, "http.request", "unknown parameter name"),
        ("POST", "/api/v1/groups", b"{", 400, "http.request", "JSON"),
        ("POST", "/api/v1/groups", b"", 400, "http.request", "JSON"),
        ("POST", "/api/v1/groups", b'{"name": "\\ud800"}', 400, "http.request", ""),
        ("POST", "/api/v1/groups", [], 400, "http.request", ""),
        ("POST", "/api/v1/groups", {}, 400, "http.request", "name is missing"),
        ("POST", "/api/v1/groups", {"name": "a", "nmae": "b"}, 400, "http.request", "unknown field nmae"),
        ("POST", "/api/v1/groups", {"name": "a\x00b"}, 400, "http.request", "name"),
        ("POST", "/api/v1/tables", {"source": "a", "copy": "yes"}, 400, "http.request", "copy"),
        ("POST", "/api/v1/tables", b'{"source": "a", "options": {"x": NaN}}', 400, "http.request", "JSON"),
        (
            "POST",
            "/api/v1/tables",
            b'{"source": "a", "options": {"x": "\\udc00"}}',
            400,
            "http.request",
            "JSON",
        ),
        ("POST", "/api/v1/tables/a/resync", {"x": 1}, 400, "http.request", "no body"),
        ("POST", "/api/v1/tables/a%00b/resync", None, 400, "http.request", "source"),
        ("POST", "/api/v1/groups", {"name": "a" * 70_000}, 400, "http.request", "bytes"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_json(
    client: Client, method: str, path: str, body: Any, status: int, code: str, word: str
) -> None:
    """Whatever is wrong, the answer is one JSON error with a code, and nothing is done."""
    answer = client.ask(method, path, body, token=TOKEN)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert word in answer.error["message"]
    assert client.stage.calls == []


def test_a_method_that_is_refused_names_those_that_are_not(client: Client) -> None:
    """HTTP wants the header `Allow` on a 405, with all methods of the address."""
    answer = client.ask("PATCH", "/api/v1/groups", token=TOKEN)
    assert answer.headers["allow"] == "GET, HEAD, POST"


def test_a_body_has_to_be_declared_as_json(client: Client) -> None:
    """A form is refused, and the answer names the required header."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.ask("POST", "/api/v1/groups", b"name=a", token=TOKEN, headers=form)
    assert answer.status == 400
    assert "Content-Type: application/json" in answer.error["hint"]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (ConfigError("the group a exists already", hint="use another name"), 422),
        (TableMissingError("the table a does not exist", hint="create it"), 404),
        (SourceUnreachableError("no connection", hint="start the server"), 503),
    ],
)
def test_a_refusal_of_the_registry_keeps_its_code_and_hint(client: Client, refusal: Any, status: int) -> None:
    """SQL, command line and HTTP refuse with the same words."""
    client.stage.refusal = refusal
    answer = client.ask("POST", "/api/v1/groups", {"name": "a"}, token=TOKEN)
    assert answer.status == status
    assert answer.error == {"code": refusal.code, "message": refusal.message, "hint": refusal.hint}


def test_a_bug_shows_its_kind_and_place_and_nothing_else(client: Client) -> None:
    """The text of a foreign exception may hold a cell value or a password: it never reaches an answer."""
    client.stage.refusal = ValueError("password=hunter2 row (4711, secret)")
    answer = client.ask("POST", "/api/v1/groups", {"name": "a"}, token=TOKEN)
    assert answer.status == 500
    assert "ValueError" in answer.error["message"]
    assert b"hunter2" not in answer.body
    assert b"4711" not in answer.body


def test_a_source_that_cannot_be_reached_keeps_its_password(server_of: Callable[..., Client]) -> None:
    """What the registry needs to connect is in no answer."""
    stage = Stage()
    stage.actions = RegistryActions("host=127.0.0.1 port=1 user=u dbname=d password=hunter2")
    client = server_of(stage, token_env="TOKEN")
    for answer in (
        client.get("/api/v1/settings"),
        client.ask("POST", "/api/v1/groups", {"name": "a"}, token=TOKEN),
    ):
        assert (answer.status, answer.error["code"]) == (503, "pg.unreachable")
        assert b"hunter2" not in answer.body


def test_every_answer_forbids_what_a_browser_should_not_do(client: Client) -> None:
    """No sniffing, no frames, no foreign scripts: in errors, too."""
    for path in ("/", "/api/v1/status", "/nowhere", "/metrics"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]


def test_the_page_is_whole_and_asks_no_other_server(client: Client) -> None:
    """Every file that a file of the page names is served, and no other host is named."""
    todo, seen = ["/"], set[str]()
    while todo:
        path = todo.pop()
        seen.add(path)
        answer = client.get(path)
        assert answer.status == 200, path
        text = answer.body.decode().replace("http://www.w3.org/", "")  # names of XML, never asked for
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), path
        named = re.findall(r'"(/page/[\w.]+)"', text) + [
            f"/page/{n}" for n in re.findall(r'from "\./([\w.]+)"', text)
        ]
        todo += [name for name in named if name not in seen]
    assert {"/page/app.js", "/page/style.css", "/page/icon.svg", "/page/list.js"} <= seen


def test_the_openapi_document_describes_every_operation(client: Client) -> None:
    """Each address of the document exists, and the document is whole in itself."""
    document = client.get("/api/v1/openapi.json").json
    text = json.dumps(document)
    references = {r.split('"')[0] for r in text.split("#/components/schemas/")[1:]}
    assert len(references) > 5
    assert references <= set(document["components"]["schemas"])
    for path in document["paths"]:
        answer = client.ask("OPTIONS", path.replace("{", "").replace("}", ""), token=TOKEN)
        assert answer.status == 405, path
        allowed = {m.lower() for m in answer.headers["allow"].split(", ")} - {"head"}
        assert allowed == set(document["paths"][path]), path


WITH_PROVIDERS = """
import sys
from opentelemetry import trace
from opentelemetry._logs import set_logger_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from aqueduck.config.server import ServerConfig
from aqueduck.web.server import serve
from tests.web.conftest import TOKEN, Client
from tests.web.made_up import Stage

spans, logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
tracers, loggers = TracerProvider(), LoggerProvider()
tracers.add_span_processor(SimpleSpanProcessor(spans))
loggers.add_log_record_processor(SimpleLogRecordProcessor(logs))
trace.set_tracer_provider(tracers)
set_logger_provider(loggers)
stage = Stage()
with serve(ServerConfig(port=0, token_env="TOKEN"), stage, stage, env={"TOKEN": TOKEN}) as address:
    client = Client(address, stage)
    assert client.get("/api/v1/tables/secret.name").status == 404
    stage.refusal = ValueError("password=hunter2")
    assert client.ask("POST", "/api/v1/groups", {"name": "a"}, token=TOKEN).status == 500
sys.exit(len(spans.get_finished_spans()) + len(logs.get_finished_logs()))
"""


def test_requests_leave_no_traces_of_their_own() -> None:
    """
    In a process with OpenTelemetry, addresses and the texts of exceptions are not sent to its collector.

    A propagator that is not installed does not keep the server from starting.
    """
    env = {**os.environ, "OTEL_PROPAGATORS": "nobody-has-it"}
    command = [sys.executable, "-c", WITH_PROVIDERS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_schemathesis_finds_nothing(client: Client, tmp_path: Path) -> None:
    """
    Requests made up from the document, right and wrong ones, in sequences too: every answer is as described.

    Only what a request does later is not looked for: it is accepted (202) and done by the service, which is made up here.
    """
    command = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        [
            command, "run", f"{client.address.rstrip('/')}/api/v1/openapi.json", "--header", f"Authorization: Bearer {TOKEN}",
            "--max-examples", "5", "--request-timeout", "60", "--no-color",
            "--exclude-checks", "use_after_free,ensure_resource_availability",
        ],
        cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"Selected: (\d+)/\1\s+Tested: \1\s", done.stdout), done.stdout[-2000:]
