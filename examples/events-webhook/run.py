"""Post every change of a table to a webhook; the receiver here is ten lines of Python's own HTTP server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg

from aqueduck.lab.embedded import EmbeddedPostgres

HERE = Path(__file__).parent


class Receiver(BaseHTTPRequestHandler):
    """Takes each event once: a POST that comes again has the same Idempotency-Key."""

    seen: set[str] = set()  # noqa: RUF012 - of all requests
    events: list[dict] = []  # noqa: RUF012

    def do_POST(self) -> None:
        events = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (key := self.headers["Idempotency-Key"]) not in self.seen:
            self.seen.add(key)
            self.events.extend(events)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def aqueduck(*arguments: str) -> None:
    """Run a command as you would type it."""
    print("$ aqueduck", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "aqueduck.cli", *arguments], check=True)


def main() -> None:
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="events-webhook-") as place, EmbeddedPostgres() as server:
        os.chdir(shutil.copytree(HERE, place, dirs_exist_ok=True))
        os.environ["PG_DSN"] = server.dsn
        os.environ["WEBHOOK_URL"] = f"http://127.0.0.1:{receiver.server_port}/orders"
        with psycopg.connect(server.dsn, autocommit=True) as shop:
            shop.execute(Path("shop.sql").read_bytes())
            aqueduck("init", "-c", "events.yaml")  # makes the slot: nothing is missed from here on
            shop.execute(
                "insert into orders select g, 'customer ' || g, g * 1.5 from generate_series(1, 25) g"
            )
            shop.execute("update orders set total = 0 where id = 3")
            shop.execute("delete from orders where id = 4")
        aqueduck("run", "-c", "events.yaml", "--once")
    receiver.shutdown()
    kinds = [event["op"] for event in Receiver.events]
    print(f"{len(kinds)} events in {len(Receiver.seen)} requests; the last two: {kinds[-2:]}")
    print(json.dumps(Receiver.events[0]))


if __name__ == "__main__":
    main()
