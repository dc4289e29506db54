"""Errors are one line, survive pickling, and come back from the text that Spark leaves of them."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduck.model.errors import (
    AqueduckError,
    ConfigError,
    LakeWriteError,
    NoKeyError,
    ProtocolError,
    Retry,
    SlotLostError,
    WalLevelError,
    error_codes,
)

CLASSES = sorted(error_codes().values(), key=lambda cls: cls.code)

# Words without the marks that the one-line form itself uses.
words = st.text(st.characters(exclude_characters="()[].", codec="utf-8"), min_size=1).map(
    lambda text: " ".join(text.split())
)
sentences = words.filter(bool)

STREAM_FAILURE = """\
[STREAM_FAILED] Query [id = 69c2, runId = eafc] terminated with exception: \
[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform latestOffset: \
Traceback (most recent call last):
  File "capture_source.py", line 8, in latestOffset
    raise SlotLostError("the slot is gone")
aqueduck.errors.SlotLostError: [pg.slot_lost] the slot a is gone (table public.t). Fix: copy again
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 69c2, runId = eafc]
"""


def test_an_error_reads_as_code_message_table_and_fix() -> None:
    """The text of an error has its code first and the next step last."""
    error = NoKeyError("no primary key", hint="add one", table="public.t")
    assert str(error) == "[pg.no_key] no primary key (table public.t). Fix: add one"


def test_an_error_without_hint_and_table_is_code_and_message() -> None:
    """What is not known leaves no trace in the text."""
    assert str(WalLevelError("wal_level is replica.")) == "[pg.wal_level] wal_level is replica"


@given(st.text(), st.text())
def test_an_error_is_always_one_line(message: str, hint: str) -> None:
    """A server's message of many lines does not break a log or a terminal."""
    assert len(str(AqueduckError(message, hint=hint)).splitlines()) == 1


def test_a_protocol_error_shows_its_offset() -> None:
    """Malformed bytes can be found in a capture of the stream."""
    assert str(ProtocolError("unknown message", offset=17)) == "[pg.protocol] unknown message (at byte 17)"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_can_be_pickled(cls: type[AqueduckError]) -> None:
    """An error keeps its class and all its fields on the way between processes."""
    error = cls("message", hint="hint", table="public.t")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert vars(copy) == vars(error)


def test_a_pickled_protocol_error_keeps_its_offset() -> None:
    """The field that only this class has is kept too."""
    assert pickle.loads(pickle.dumps(ProtocolError("message", offset=0))).offset == 0


@pytest.mark.parametrize("cls", CLASSES)
@given(message=sentences, hint=st.none() | sentences, table=st.none() | sentences)
@settings(max_examples=10)  # for each of some sixty classes, which all share the way
def test_every_error_comes_back_from_its_text(
    cls: type[AqueduckError], message: str, hint: str | None, table: str | None
) -> None:
    """Text is all that crosses Spark, and nothing of the error is lost in it."""
    error = cls(message, hint=hint, table=table)
    copy = AqueduckError.from_text(
        f"Traceback:\n  x\naqueduck.errors.{cls.__name__}: {error}\n\tat org.apache"
    )
    assert type(copy) is cls
    assert vars(copy) == vars(error)


@given(st.integers(min_value=0))
def test_the_offset_comes_back_from_text(offset: int) -> None:
    """A protocol error that crosses Spark still says where."""
    error = AqueduckError.from_text(str(ProtocolError("m", offset=offset, table="a.b", hint="h")))
    assert isinstance(error, ProtocolError)
    assert (error.offset, error.message, error.table) == (offset, "m", "a.b")


def test_the_error_is_found_in_a_failed_query_of_spark() -> None:
    """The error of a source is restored from the text of Spark 4.3."""
    error = AqueduckError.from_text(STREAM_FAILURE)
    assert isinstance(error, SlotLostError)
    assert (error.message, error.table, error.hint) == ("the slot a is gone", "public.t", "copy again")


def test_a_sqlstate_that_spark_appends_is_not_part_of_the_hint() -> None:
    """Spark's own marks on the same line are left out, however many they are."""
    error = AqueduckError.from_text("[lake.write] disk. Fix: make room SQLSTATE: 38000 SQLSTATE: XXKST")
    assert error is not None
    assert error.hint == "make room"


def test_the_last_error_in_a_chain_counts() -> None:
    """A traceback prints causes first: the error that was raised is the last one."""
    text = (
        f"{ProtocolError('cause')}\nThe above exception was the direct cause of …\n{LakeWriteError('raised')}"
    )
    assert isinstance(AqueduckError.from_text(text), LakeWriteError)


def test_an_error_quoted_in_another_ones_message_does_not_count() -> None:
    """On one line the first code is the error's own."""
    assert isinstance(AqueduckError.from_text("[lake.write] after [pg.protocol] x"), LakeWriteError)


@pytest.mark.parametrize("text", ["", "boom", "[STREAM_FAILED] x", "[pg.nonsense] x", "[lake.write]"])
def test_text_without_a_known_code_is_no_error_of_ours(text: str) -> None:
    """Foreign failures stay foreign."""
    assert AqueduckError.from_text(text) is None


def test_only_configuration_errors_exit_with_2() -> None:
    """The exit code distinguishes a wrong file from a failure."""
    assert {cls.code for cls in CLASSES if cls.exit_code == 2} == {"config.invalid"}
    assert {cls.exit_code for cls in CLASSES} == {1, 2}
    assert issubclass(ConfigError, AqueduckError)


def test_errors_that_pass_by_themselves_are_retried() -> None:
    """A person is asked only where waiting cannot help."""
    assert {cls.code for cls in CLASSES if cls.retry is Retry.AUTO} == {
        "pg.unreachable",
        "pg.slot_active",
        "pg.protocol",
        "pg.connection_lost",
        "lake.conflict",
        "lake.file_missing",
        "lake.write",
        "copy.disturbed",
        "spark.query",
        "sink.write",
        "sink.unreachable",
        "verify.postponed",
    }
