"""Each outside service has one seam: whatever its client raises comes out under our name, retryable or final.

The errors are the clients' own; the cause chain is kept, so that a person finds the first fault.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import botocore.exceptions
import httpx
import pytest
import sqlalchemy.exc
from boto3.exceptions import S3UploadFailedError
from sqlalchemy import Engine, text

from activities.generation.engine import EngineClient
from activities.sandbox.channel import Operation, Result
from activities.sandbox.container import SandboxSpec
from activities.sandbox.daemon import Daemon, Refused
from activities.sandbox.docker import DockerBackend
from activities.sandbox.verification import judge
from storage.database import session
from storage.objects import MissingObject, ObjectStore
from tasksets.base import Task
from tests.sandbox.test_rules import result
from workers.temporal import named
from workflows.contracts import EngineInfo, FailureType
from workflows.errors import (
    EngineError,
    RatchetError,
    SandboxError,
    StorageError,
    VerifierBrokenByAnswer,
    VerifierError,
)

REQUEST = httpx.Request("POST", "http://engine")
ENGINE = EngineInfo(name="here-e0", host="here", url="http://engine")
Handler = Callable[[httpx.Request], httpx.Response]


def raising(error: Exception) -> Handler:
    def handle(_: httpx.Request) -> httpx.Response:
        raise error

    return handle


def answering(status: int, body: str = "{}") -> Handler:
    return lambda _: httpx.Response(status, text=body)


@pytest.mark.parametrize(
    ("handler", "retryable", "cause"),
    [
        (raising(httpx.ConnectError("refused", request=REQUEST)), True, httpx.ConnectError),
        (raising(httpx.ConnectTimeout("slow", request=REQUEST)), True, httpx.ConnectTimeout),
        (raising(httpx.ReadTimeout("slow", request=REQUEST)), True, httpx.ReadTimeout),
        (raising(httpx.ReadError("reset", request=REQUEST)), True, httpx.ReadError),
        (raising(httpx.WriteError("broken pipe", request=REQUEST)), True, httpx.WriteError),
        (raising(httpx.RemoteProtocolError("half an answer", request=REQUEST)), True, httpx.RemoteProtocolError),
        (raising(httpx.DecodingError("bad gzip", request=REQUEST)), True, httpx.DecodingError),
        (raising(httpx.TooManyRedirects("loop", request=REQUEST)), True, httpx.TooManyRedirects),
        (answering(500), True, None),
        (answering(503), True, None),
        (answering(429), True, None),
        (answering(400), False, None),
        (answering(404), False, None),
        (answering(200, "<html>a proxy's page</html>"), True, ValueError),
        (answering(200, '{"another": "shape"}'), True, LookupError),
        (answering(200, "[]"), True, TypeError),
    ],
)
async def test_every_fault_of_an_engine_is_an_engine_error(
    handler: Handler, retryable: bool, cause: type[Exception] | None
) -> None:
    client = EngineClient(ENGINE, transport=httpx.MockTransport(handler))
    asked = {"temperature": 1.0, "max_tokens": 1, "seed": 0, "stop_token_ids": []}
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.generate([1], **asked),
        client.label,
        client.served_names,
        client.digest,
        lambda: client.score([1, 2]),
        lambda: client.cached_tokens([1, 2]),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="here-e0") as caught:
            await call()
        assert caught.value.retryable is retryable
        assert isinstance(caught.value.__cause__, cause or type(None))


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (aiodocker.DockerError(500, {"message": "server error"}), True),
        (aiodocker.DockerError(404, {"message": "no such container"}), True),
        (aiodocker.DockerError(409, {"message": "conflict"}), True),
        (aiodocker.DockerError(400, {"message": "bad parameter"}), False),
        (aiodocker.DockerError(900, {"message": "cannot connect"}), True),
        (aiohttp.ClientConnectionError("reset"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ClientPayloadError("half an answer"), True),
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
    ],
)
async def test_every_fault_of_the_daemon_is_a_sandbox_error(
    error: Exception, retryable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.sandbox.daemon.PAUSES_S", (0.0,))
    daemon = Daemon("unix:///nowhere")

    async def fail(_: aiodocker.Docker) -> None:
        raise error

    with pytest.raises(SandboxError, match="docker try") as caught:
        await daemon.call("try", fail)
    assert caught.value.retryable is retryable
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, Refused) is (getattr(error, "status", 900) != 900)
    await daemon.close()


async def test_a_state_folder_that_can_not_be_written_is_a_sandbox_error(tmp_path: Path) -> None:
    backend = DockerBackend("unix:///nowhere", tmp_path / "state", slots=1)
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(SandboxError, match="state folder") as caught:
        await backend._containers.tools()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(SandboxError, match="state folder"):
        await backend.acquire(SandboxSpec(), {"attempt": "run/g0/e0/a0"})


TASK = Task(id="t", kind="k", instruction="", setup="", check="check")


@pytest.mark.parametrize(
    ("on_answer", "on_known_good", "expected"),
    [
        (result(), result(), None),
        (result(exit_code=7), result(), VerifierBrokenByAnswer),
        (result(exit_code=None, signal=11), result(), VerifierBrokenByAnswer),
        (result(exit_code=None, timed_out=True), result(), VerifierBrokenByAnswer),
        (result(exit_code=7), result(exit_code=7), VerifierError),
        (result(exit_code=7), result(exit_code=1), VerifierError),
        (result(exit_code=7), result(exit_code=None, timed_out=True), VerifierError),
    ],
)
async def test_a_verifier_that_breaks_is_named_after_a_known_good_answer(
    on_answer: Result, on_known_good: Result, expected: type[RatchetError] | None
) -> None:
    async def run(_: Operation) -> Result:
        return on_answer

    async def fresh(op: Operation) -> Result:
        return on_known_good if op.op_id.startswith("check") else result()

    class KnownGood:
        async def __aenter__(self) -> Any:
            return fresh

        async def __aexit__(self, *_: object) -> None:
            pass

    if expected is None:
        assert (await judge(TASK, "", run, KnownGood)).passed
        return
    with pytest.raises(expected) as caught:
        await judge(TASK, "", run, KnownGood)
    assert not caught.value.retryable
    assert set(caught.value.evidence) == {"check on this answer", "check on a known-good answer"}


def refusal(code: str, status: int) -> botocore.exceptions.ClientError:
    answer: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (refusal("SlowDown", 503), True),
        (refusal("InternalError", 500), True),
        (refusal("RequestTimeout", 400), True),
        (refusal("AccessDenied", 403), False),
        (refusal("403", 403), False),
        (refusal("InvalidArgument", 400), False),
        (refusal("NoSuchBucket", 404), False),
        (refusal("NoSuchKey", 404), False),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://s3"), True),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://s3"), True),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://s3"), True),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="http://s3"), True),
        (botocore.exceptions.ResponseStreamingError(error="cut"), True),
        (botocore.exceptions.NoCredentialsError(), False),
        (S3UploadFailedError("part 3 failed"), True),
        (OSError(28, "No space left on device"), True),
    ],
)
def test_every_fault_of_the_object_store_is_a_storage_error(error: Exception, retryable: bool, tmp_path: Path) -> None:
    class Client:
        def __getattr__(self, _: str) -> Any:
            def call(*_: object, **__: object) -> None:
                raise error

            return call

    store = ObjectStore(Client(), "bucket")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    calls: list[Callable[[], object]] = [
        lambda: store.put("key", b""),
        lambda: store.get("key"),
        lambda: store.put_file("key", tmp_path / "file"),
        lambda: store.get_file("key", tmp_path / "other"),
        lambda: list(store.keys("prefix")),
        lambda: store.delete(["key"]),
        store.ensure_bucket,
    ]
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.retryable is retryable
        assert caught.value.__cause__ is error
        assert isinstance(caught.value, MissingObject) is ("NoSuchKey" in str(error))


ORIGINAL = sqlite3.OperationalError("database is locked")


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (sqlalchemy.exc.OperationalError("BEGIN", {}, ORIGINAL), True),
        (sqlalchemy.exc.OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full")), True),
        (sqlalchemy.exc.InterfaceError("SELECT", {}, sqlite3.InterfaceError("gone")), True),
        (sqlalchemy.exc.InternalError("SELECT", {}, sqlite3.InternalError("in recovery")), True),
        (sqlalchemy.exc.TimeoutError("no connection in the pool"), True),
        (sqlalchemy.exc.IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE")), False),
        (sqlalchemy.exc.ProgrammingError("SELEC", {}, sqlite3.ProgrammingError("syntax")), False),
        (sqlalchemy.exc.DataError("INSERT", {}, sqlite3.DataError("too long")), False),
    ],
)
def test_every_fault_of_the_database_is_a_storage_error(database: Engine, error: Exception, retryable: bool) -> None:
    with pytest.raises(StorageError, match="database") as caught, session(database):
        raise error
    assert caught.value.retryable is retryable
    assert caught.value.__cause__ is error


def test_a_full_disk_under_the_database_may_pass(database: Engine) -> None:
    with session(database) as opened:
        pages = opened.connection().execute(text("PRAGMA page_count")).scalar()
        opened.connection().execute(text(f"PRAGMA max_page_count={pages}"))
        with pytest.raises(sqlalchemy.exc.OperationalError, match="full") as full:
            for _ in range(100):
                opened.connection().execute(text("CREATE TABLE IF NOT EXISTS big (x)"))
                opened.connection().execute(text("INSERT INTO big VALUES (zeroblob(100000))"))
        opened.rollback()
    with pytest.raises(StorageError, match="disk is full") as caught, session(database):
        raise full.value
    assert caught.value.retryable


def test_a_named_failure_crosses_temporal_with_its_type_its_evidence_and_whether_it_is_final() -> None:
    final = named(VerifierError("broken", retryable=False, evidence={"check": "exit 2"}))
    assert (final.type, final.non_retryable, list(final.details)) == (
        FailureType.VERIFIER,
        True,
        [{"check": "exit 2"}],
    )
    passing = named(StorageError("locked"))
    assert (passing.type, passing.non_retryable, list(passing.details)) == (FailureType.STORAGE, False, [])
