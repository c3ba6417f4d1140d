"""What the Temporal server gets to see with `payload_keys`, and who opens it again."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio import activity, workflow
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

from tests.workflows.conftest import temporal, unique
from workers.codec import SealedPayloads
from workers.codec_server import CodecServer
from workers.settings import Settings
from workers.stack.parts import tool
from workers.temporal import codec_of, plugin
from workflows import policies
from workflows.contracts import SweepInput, SweepOutput
from workflows.errors import InvalidConfig, SandboxError

__all__ = ["temporal"]

SECRET = "swordfish"
OLD, NEW = (base64.b64encode(bytes([byte]) * 32).decode() for byte in (1, 2))
UI = 8233


async def roundtrip(codec: SealedPayloads, data: bytes) -> tuple[Payload, Payload]:
    (sealed,) = await codec.encode([Payload(metadata={"encoding": b"json/plain"}, data=data)])
    (opened,) = await codec.decode([sealed])
    return sealed, opened


@given(st.binary(max_size=200))
async def test_what_is_sealed_opens_to_what_it_was_and_is_never_sealed_alike(data: bytes) -> None:
    codec = SealedPayloads.parse(f"k1={OLD}")
    sealed, opened = await roundtrip(codec, data)
    assert opened.data == data and opened.metadata["encoding"] == b"json/plain"
    assert (await roundtrip(codec, data))[0].data != sealed.data
    assert len(data) < 4 or data not in sealed.data


async def test_a_changed_payload_or_key_name_is_refused_and_a_plain_one_passes() -> None:
    codec = SealedPayloads.parse(f"k1={OLD},k2={NEW}")
    sealed, _ = await roundtrip(codec, b"x")
    changed = Payload(metadata=sealed.metadata, data=sealed.data[:-1] + bytes([sealed.data[-1] ^ 1]))
    renamed = Payload(metadata={**sealed.metadata, "encryption-key-id": b"k2"}, data=sealed.data)
    for wrong in (changed, renamed):
        with pytest.raises(InvalidConfig, match="was changed"):
            await codec.decode([wrong])
    plain = Payload(metadata={"encoding": b"json/plain"}, data=b"1")
    assert await codec.decode([plain]) == [plain]


async def test_a_new_key_in_front_seals_and_the_old_one_opens_what_it_sealed() -> None:
    sealed, _ = await roundtrip(SealedPayloads.parse(f"old={OLD}"), b"x")
    both = SealedPayloads.parse(f"new={NEW}, old={OLD}")
    assert (await both.decode([sealed]))[0].data == b"x"
    fresh, _ = await roundtrip(both, b"x")
    assert fresh.metadata["encryption-key-id"] == b"new"
    with pytest.raises(InvalidConfig, match="sealed with the key 'old', and there are new: add it"):
        await SealedPayloads.parse(f"new={NEW}").decode([sealed])


@pytest.mark.parametrize("text", ["k1", "k1=", "k1=c2hvcnQ=", f"k1={OLD},k1={NEW}", f"a b={OLD}", "k1=*", f"={OLD}"])
def test_what_is_no_key_is_refused_with_how_to_make_one_and_never_shown(text: str) -> None:
    with pytest.raises(InvalidConfig, match="openssl rand -base64 32") as refused:
        codec_of(Settings(payload_keys=text))  # type: ignore[arg-type]
    assert OLD not in str(refused.value)


def test_without_keys_nothing_is_sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RATCHET_PAYLOAD_KEYS", raising=False)
    assert codec_of(Settings(home=tmp_path)) is None


@workflow.defn(name="Secretive", sandboxed=False)
class Secretive:
    """Its activity gets the secret, gives it back, and at last fails with it."""

    @workflow.run
    async def run(self, input: SweepInput) -> SweepOutput:
        workflow.set_current_details(input.run)
        await policies.call("tell", input, SweepInput, policies.HOST, summary=input.run)
        return await policies.call("fail", input, SweepOutput, policies.HOST, summary=input.run)


@activity.defn
async def tell(message: SweepInput) -> SweepInput:
    return message


@activity.defn
async def fail(message: SweepInput) -> SweepOutput:
    raise SandboxError(f"no sandbox for {message.run}", retryable=False)


@pytest.fixture
async def told(temporal: Client) -> AsyncIterator[tuple[Client, str]]:
    """(the sealing client, the id of a workflow that ended) of a server that was told the secret."""
    address = temporal.service_client.config.target_host
    client = await Client.connect(address, plugins=[plugin(codec=SealedPayloads.parse(f"k1={OLD}"))])
    queue, name = unique("queue"), unique("secretive")
    async with Worker(client, task_queue=queue, workflows=[Secretive], activities=[tell, fail]):
        with pytest.raises(WorkflowFailureError) as failed:
            await client.execute_workflow("Secretive", SweepInput(run=SECRET), id=name, task_queue=queue)
        assert SECRET in str(failed.value.cause.cause), "workflows and clients read it"  # type: ignore[union-attr]
    yield client, name


async def test_the_servers_history_holds_no_word_of_inputs_results_summaries_or_failures(
    temporal: Client, told: tuple[Client, str]
) -> None:
    _, name = told
    history = await temporal.get_workflow_handle(name).fetch_history()
    raw = b"".join(event.SerializeToString() for event in history.events)
    assert len(history.events) > 10 and b"binary/encrypted" in raw and b"Secretive" in raw
    assert SECRET.encode() not in raw and base64.b64encode(SECRET.encode()) not in raw


@contextmanager
def serving(codec: SealedPayloads) -> Iterator[CodecServer]:
    server = CodecServer(codec, 0, UI)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


async def test_the_temporal_command_reads_it_through_the_codec_endpoint_and_not_without(
    temporal: Client, told: tuple[Client, str]
) -> None:
    _, name = told
    address = temporal.service_client.config.target_host
    show = [tool("temporal"), "workflow", "show", "-w", name, "--address", address, "-o", "json"]

    def shown(*options: str) -> str:
        done = subprocess.run([*show, *options], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    assert SECRET not in shown()
    with serving(SealedPayloads.parse(f"k1={OLD}")) as server:
        opened = shown("--codec-endpoint", server.url)
    data = json.dumps(json.loads(opened))
    assert SECRET in data or base64.b64encode(f'{{"run":"{SECRET}"}}'.encode()).decode() in data


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": f"http://localhost:{UI}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example:80"}, 403),
    ],
)
def test_the_codec_endpoint_answers_this_machine_and_the_stacks_own_ui_alone(
    headers: dict[str, str], status: int
) -> None:
    body: dict[str, Any] = {"payloads": [{"metadata": {"encoding": "anNvbi9wbGFpbg=="}, "data": "MQ=="}]}
    with serving(SealedPayloads.parse(f"k1={OLD}")) as server:
        assert server.server_address[0] == "127.0.0.1"
        answer = httpx.post(f"{server.url}/encode", json=body, headers=headers)
        assert answer.status_code == status
        assert httpx.post(f"{server.url}/nothing", json=body, headers=headers).status_code == 404
        assert (answer.headers.get("access-control-allow-origin") is not None) == ("localhost" in str(headers))
        if status == 200:
            opened = httpx.post(f"{server.url}/decode", json=answer.json(), headers=headers)
            assert opened.json() == body
        wrong = {"payloads": [{"metadata": {"encoding": "YmluYXJ5L2VuY3J5cHRlZA=="}, "data": "MQ=="}]}
        assert httpx.post(f"{server.url}/decode", json=wrong).status_code == 400
