"""
An object store for tests: moto's S3 behind a real HTTP server on loopback, without TLS, addressed by path.

`S3` counts what it is asked and refuses requests that are not signed with its key, so that a lake whose
credentials get lost on the way cannot be written.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import pytest

_numbers = itertools.count(1)
KEY, SECRET = "AQUEDUCKTESTKEY", "a-secret-that-no-log-may-show"


@dataclass
class S3:
    """Its address, and the requests that it received."""

    address: str
    asked: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    @property
    def properties(self) -> dict[str, str]:
        """As in a fan-out file; the credentials are in variables that `env` has."""
        return {
            "s3_endpoint": self.address,
            "s3_use_ssl": "false",
            "s3_url_style": "path",
            "s3_region": "us-east-1",
            "s3_access_key_id_env": "S3_ACCESS_KEY_ID",
            "s3_secret_access_key_env": "S3_SECRET_ACCESS_KEY",
        }

    @property
    def env(self) -> dict[str, str]:
        return {"S3_ACCESS_KEY_ID": KEY, "S3_SECRET_ACCESS_KEY": SECRET}

    @property
    def resolved(self) -> tuple[tuple[str, str], ...]:
        """The same with the credentials in place."""
        found = {
            k.removesuffix("_env"): self.env[v] if k.endswith("_env") else v
            for k, v in self.properties.items()
        }
        return tuple(sorted(found.items()))

    @functools.cached_property
    def client(self) -> Any:
        """An observer of its own."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=f"http://{self.address}", region_name="us-east-1",
            aws_access_key_id=KEY, aws_secret_access_key=SECRET,
        )  # fmt: skip

    def make_bucket(self, kind: str) -> str:
        """A bucket that no other test has; its name."""
        name = f"{kind}-{next(_numbers)}"
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """The names of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    # Imported here: most tests need no object store.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application: Any = DomainDispatcherApplication(create_backend_app)
    found = S3("")

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            found.refused += 1
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code></Error>"]
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        kind = "part" if "partNumber" in query else "uploads" if "uploads" in query else "plain"
        found.asked[f"{environ['REQUEST_METHOD']} {kind}"] += 1
        answer: Iterable[bytes] = application(environ, start)
        return answer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server("127.0.0.1", 0, guarded, threaded=True)
    found.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
