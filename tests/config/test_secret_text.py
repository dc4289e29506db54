"""Connection strings get to tasks by a file for our user alone, and are in nothing that Spark keeps."""

from __future__ import annotations

import copy
import json
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StructType

from aqueduck.config.lake_place import LakeKeys, LakePlace, resolve
from aqueduck.config.secret_text import SECRETS_VARIABLE, SecretText, keep_secrets
from aqueduck.config.sync import parse_config
from aqueduck.lake.destinations.cycle import Destination
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import TableName
from aqueduck.spark.formats.cdc_options import CdcOptions
from aqueduck.spark.formats.cdc_source import CdcReader
from aqueduck.spark.formats.lake_source import LakeOptions
from aqueduck.spark.formats.lake_writer import WriteOptions
from aqueduck.spark.formats.source_options import Options
from aqueduck.spark.formats.table_source import TableOptions
from aqueduck.spark.query.capture_source import CaptureReader
from aqueduck.spark.query.copy_job import CopyJob

DSN = "host=h user=u password=planted"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SECRETS_VARIABLE, "")  # what the test sets goes with it
    directory = tmp_path / "kept"
    directory.mkdir(mode=0o700)
    keep_secrets(directory)
    return directory


def places() -> list[Any]:
    """What carries credentials into tasks, as the flows make it."""
    keys = LakeKeys(catalog_env="C", data_path="s3://b/d", properties={"s3_secret_access_key_env": "K"})
    place = resolve(keys, {}, {"C": f"postgres:{DSN}", "K": "planted"})
    config = parse_config(
        json.dumps(
            {
                "source": {"dsn": DSN},
                "lake": {"catalog": f"postgres:{DSN}", "data_path": "/d"},
                "groups": [{"name": "g", "tables": [{"source": "public.t"}]}],
            }
        ),
        base_dir=Path("/"),
        env={},
    )
    return [
        CopyJob(config.source.dsn, "", "/d", ()),
        config.lake,
        place,
        Destination("d", "v", place, TableName("main", "t"), None),
        Options("x", {"dsn": DSN}, ["dsn"]).secret("dsn"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_no_closure_has_a_password(kept: Path, number: int) -> None:
    """A task's settings are pickled without the password, and have it again in the task."""
    value = places()[number]
    pickled = cloudpickle.dumps(lambda: value)  # type: ignore[no-untyped-call]
    assert b"planted" not in pickled
    assert pickle.loads(pickled)() == value
    assert b"planted" in b"".join(path.read_bytes() for path in kept.iterdir())


def test_the_file_is_for_our_user_alone(kept: Path) -> None:
    """One file a process, with each text once."""
    for _ in range(3):
        pickle.dumps(SecretText(DSN))
    [file] = kept.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == DSN


def test_another_process_of_ours_reads_it(kept: Path) -> None:
    """As a worker does, which Spark starts."""
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer) == sys.argv[1])"
    loaded = subprocess.run(
        [sys.executable, "-c", program, DSN], input=pickle.dumps(SecretText(DSN)), capture_output=True
    )
    assert loaded.stdout == b"True\n", loaded.stderr


def test_a_task_without_the_file_says_why(kept: Path) -> None:
    """An executor on another host whose storage is not ours."""
    pickled = pickle.dumps(SecretText("another"))
    [file] = kept.iterdir()
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read the service's secrets") as refused:
        pickle.loads(pickled)
    assert "state_dir" in str(refused.value.hint)


def test_it_is_a_text_like_others_and_shows_nothing() -> None:
    """Libraries can use the text; tracebacks and logs do not show it."""
    text = SecretText(DSN)
    assert text == DSN
    assert f"{text}" == DSN
    assert json.loads(json.dumps(text)) == DSN
    assert copy.deepcopy(text) is text
    assert "planted" not in repr(text) + repr(CopyJob(text, "", "", ())) + repr(
        LakePlace(catalog=DSN, data_path="")
    )


def test_a_reader_of_changes_travels_without_its_settings(tmp_path: Path) -> None:
    """The planner has read them; its tasks fold files, and know of no database."""
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps({"dsn": DSN, "slot": "s", "publication": "p", "position": 7, "directory": "/d"})
    )
    reader = CaptureReader(str(settings), "{}")
    assert reader.initialOffset() == {"position": 7}
    assert b"planted" not in cloudpickle.dumps(reader.read)  # type: ignore[no-untyped-call]


def test_what_a_variable_or_a_file_names_crosses_as_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster without a common directory, tasks read variables and files themselves; the secret does not travel."""
    monkeypatch.delenv(SECRETS_VARIABLE, raising=False)
    monkeypatch.setenv("PG_DSN_OF_TEST", DSN)
    monkeypatch.setenv("S3_OF_TEST", "s3-planted")
    file = tmp_path / "catalog"
    file.write_text(f"postgres:{DSN}\n")
    lake = {
        "catalog_file": str(file),
        "table": "t",
        "data_path": "s3://b/d",
        "s3_secret_access_key_env": "S3_OF_TEST",
    }
    carriers = [
        TableOptions.read({"dsn_env": "PG_DSN_OF_TEST", "table": "t"}),
        TableOptions.read({"dsn_file": str(file), "table": "t"}),
        LakeOptions.read(lake),
        WriteOptions.read(lake, overwrite=False),
    ]
    for value in carriers:
        pickled = cloudpickle.dumps(lambda value=value: value)  # type: ignore[no-untyped-call]
        assert b"planted" not in pickled
        assert pickle.loads(pickled)() == value
        assert "planted" not in repr(value)
    monkeypatch.delenv("PG_DSN_OF_TEST")
    with pytest.raises(ConfigError, match="the variable PG_DSN_OF_TEST is not set") as refused:
        pickle.loads(pickle.dumps(carriers[0]))
    assert "dsn_file" in str(refused.value.hint)


def test_tasks_of_postgres_cdc_know_no_connection_string(monkeypatch: pytest.MonkeyPatch) -> None:
    """They turn staged files into rows; even a text that an option holds itself stays on the driver."""
    monkeypatch.delenv(SECRETS_VARIABLE, raising=False)
    options = CdcOptions.read({"dsn": DSN, "slot": "s", "publication": "p"})
    reader = CdcReader(options, StructType([]))
    assert b"planted" not in cloudpickle.dumps(reader.read)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("more", [{"dsn_env": "X_OF_TEST"}, {"dsn_file": "/x"}])
def test_two_places_for_one_text_are_refused(more: dict[str, str]) -> None:
    """It would be unclear which one counts."""
    with pytest.raises(ConfigError, match="has both options dsn and dsn_"):
        Options("x", {"dsn": DSN, **more}, ["dsn", *more]).secret("dsn")
