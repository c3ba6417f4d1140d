"""Servers that are not the stack's own: found and authenticated as the SDK and the `temporal` command do it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

from tests.workflows.conftest import local_server, unique
from workers.settings import Settings, UpOptions
from workers.stack.control import merge
from workers.stack.namespace import ensure_namespace
from workers.stack.parts import SEARCH_ATTRIBUTES
from workers.stack.state import Home, Stack
from workers.temporal import connect, credentials


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("RATCHET_", "TEMPORAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[str]:
    async with local_server() as client:
        yield client.service_client.config.target_host


def certificates(folder: Path) -> None:
    """`ca.pem`, and `cert.pem` with `key.pem` of 127.0.0.1, which it has signed."""
    folder.mkdir()
    (folder / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -out ca.pem -keyout ca.key",
        "req -new -newkey rsa:2048 -nodes -subj /CN=localhost -out asked.pem -keyout key.pem",
        "x509 -req -in asked.pem -CA ca.pem -CAkey ca.key -set_serial 1 -days 2 -extfile extensions -out cert.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


@asynccontextmanager
async def tls_in_front_of(target: str, folder: Path, *, mutual: bool = False) -> AsyncIterator[tuple[str, list[Any]]]:
    """A TLS door to a server as Temporal Cloud has one: its address, and the metadata of what came through."""
    certificates(folder)
    authority, certificate, key = ((folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
    seen: list[Any] = []
    inside = grpc.aio.insecure_channel(target)

    class Door(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            async def forward(request: bytes, context: Any) -> bytes:
                seen.append(dict(call.invocation_metadata))
                answer: bytes = await inside.unary_unary(call.method)(request, timeout=30)
                return answer

            return grpc.unary_unary_rpc_method_handler(forward)

    outside = grpc.aio.server()
    outside.add_generic_rpc_handlers((Door(),))
    door = grpc.ssl_server_credentials([(key, certificate)], authority if mutual else None, mutual)
    port = outside.add_secure_port("127.0.0.1:0", door)
    await outside.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await outside.stop(0)
        await inside.close()


async def test_a_server_with_tls_and_an_api_key_is_reached_by_the_standard_variables(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tls_in_front_of(server, tmp_path / "tls") as (address, seen):
        monkeypatch.setenv("TEMPORAL_ADDRESS", address)
        monkeypatch.setenv("TEMPORAL_API_KEY", "a-key")
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(tmp_path / "tls/ca.pem"))
        client = await connect(Settings(home=tmp_path), role="test")
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    assert len(seen) >= 2
    assert {metadata["authorization"] for metadata in seen} == {"Bearer a-key"}


async def test_a_server_that_asks_for_a_certificate_gets_the_one_of_the_variables(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tls_in_front_of(server, tmp_path / "tls", mutual=True) as (address, _):
        monkeypatch.setenv("TEMPORAL_ADDRESS", address)
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(tmp_path / "tls/ca.pem"))
        with pytest.raises(RuntimeError):
            await connect(Settings(home=tmp_path), role="test")
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(tmp_path / "tls/cert.pem"))
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_KEY_PATH", str(tmp_path / "tls/key.pem"))
        client = await connect(Settings(home=tmp_path), role="test")
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))


def test_a_key_is_shown_to_no_other_server_than_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_API_KEY", "a-key")
    assert credentials(Settings(home=tmp_path)) == {}, "the stack's own server on this machine"
    elsewhere = Settings(home=tmp_path, temporal_address="temporal.example:7233")
    assert credentials(elsewhere)["api_key"] == "a-key"
    monkeypatch.setenv("TEMPORAL_ADDRESS", "cloud.example:7233")
    assert credentials(elsewhere) == {}
    ours = Settings(home=tmp_path)
    assert ours.temporal_address == "cloud.example:7233"
    assert credentials(ours)["api_key"] == "a-key" and credentials(ours)["tls"]


def test_the_stacks_own_server_goes_before_the_sdks_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "cloud.example:7233")
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "prod.a1b2c")
    ambient = Settings(home=tmp_path)
    assert (ambient.temporal_address, ambient.temporal_namespace) == ("cloud.example:7233", "prod.a1b2c")
    home = Home(tmp_path)
    home.create()
    home.save_stack(merge(None, UpOptions(), ambient))
    own = Settings(home=tmp_path)
    assert (own.temporal_address, own.temporal_namespace) == ("127.0.0.1:7233", "default")
    home.save_stack(merge(None, UpOptions(parts="rollout"), ambient))
    monkeypatch.delenv("TEMPORAL_ADDRESS")
    monkeypatch.delenv("TEMPORAL_NAMESPACE")
    remembered = Settings(home=tmp_path)
    assert (remembered.temporal_address, remembered.temporal_namespace) == ("cloud.example:7233", "prod.a1b2c")
    monkeypatch.setenv("RATCHET_TEMPORAL_ADDRESS", "127.0.0.1:1")
    assert Settings(home=tmp_path).temporal_address == "127.0.0.1:1"


def test_a_profile_of_the_configuration_file_counts_as_well(tmp_path: Path) -> None:
    file = tmp_path / "config/temporalio/temporal.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[profile.default]\naddress = "cloud.example:7233"\nnamespace = "n"\napi_key = "k"\n')
    found = Settings(home=tmp_path / "home")
    assert (found.temporal_address, found.temporal_namespace) == ("cloud.example:7233", "n")
    assert credentials(found)["api_key"] == "k"


async def test_a_new_server_gets_the_namespace_and_the_attributes_that_runs_need(server: str, tmp_path: Path) -> None:
    name = unique("namespace")
    client = await connect(Settings(home=tmp_path, temporal_address=server, temporal_namespace=name), role="test")
    for _ in range(2):
        await ensure_namespace(client, retention_days=30)
    found = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=name))
    assert {item.partition("=")[0] for item in SEARCH_ATTRIBUTES} <= set(found.custom_attributes)
    described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=name))
    assert described.config.workflow_execution_retention_ttl.ToTimedelta().days == 30


def test_an_engine_on_another_address_is_reached_there_by_everybody(tmp_path: Path) -> None:
    ambient = Settings(home=tmp_path, engine_host="10.0.0.7")
    stack = Stack(engines=2).with_settings(ambient)
    assert stack.settings["engines"] == "local-e0=http://10.0.0.7:9721,local-e1=http://10.0.0.7:9722"
