"""The HTTP API over a service that runs: made-up requests change real groups and tables, and break nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aqueduck.config.server import ServerConfig
from aqueduck.sync.actions import RegistryActions
from aqueduck.sync.overview import SyncOverviews
from aqueduck.web.server import serve
from tests.fix_postgres import Database, wait_until
from tests.local_service import LocalService, local_config

TOKEN = "a-token-that-nobody-guesses"


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("without_spark")
@pytest.mark.parametrize("examples", ["1", pytest.param("20", marks=pytest.mark.slow)])
def test_made_up_requests_meet_a_service_that_answers_as_described(
    db: Database, tmp_path: Path, examples: str
) -> None:
    """
    Requests of schemathesis, right and wrong ones, against a service with its registry: no answer is an error of the server.

    Afterwards the service still runs, and follows a table that is added.
    """
    db.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    service = LocalService(db, local_config(db, tmp_path, {"main": ["public.t"]})).start()
    try:
        overviews, actions = SyncOverviews(service.service), RegistryActions(db.dsn)
        config = ServerConfig(port=0, token_env="TOKEN")
        with serve(config, overviews, actions, env={"TOKEN": TOKEN}) as address:
            done = subprocess.run(
                [
                    Path(sys.executable).with_name("schemathesis"), "run", f"{address}api/v1/openapi.json",
                    "--header", f"Authorization: Bearer {TOKEN}", "--max-examples", examples, "--seed", "1",
                    "--request-timeout", "60", "--no-color", "--phases", "examples,coverage,fuzzing",
                    "--checks", "not_a_server_error,status_code_conformance,response_schema_conformance,content_type_conformance",
                ],
                cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
            assert re.search(r"Selected: (\d+)/\1\s+Tested: \1\s", done.stdout), done.stdout[-2000:]
            assert service.error is None
            db.execute("create table late (id int primary key)")
            db.execute("select aqueduck.create_group('after')")
            db.execute("select aqueduck.add_table('public.late', group_name => 'after')")
            state = "select state from aqueduck.status() where source = 'public.late'"
            wait_until(lambda: db.query(state) == [("STREAMING",)], "the table streams", 60)
    finally:
        service.stop()
