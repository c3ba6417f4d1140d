"""An attempt's spans at a real collector: one trace, whoever played which part of it, and off unless asked for."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from temporalio.client import Client
from temporalio.worker import Replayer, Worker

from tests.replay.changed import ReplayedEpisode
from tests.replay.test_histories import FOLDER, history
from tests.workflows.conftest import local_server, unique
from tests.workflows.fakes import World
from tests.workflows.test_episode import TASK_REF, limits
from workers.settings import Settings, otlp_protocol
from workers.telemetry import telemetry
from workers.temporal import plugin
from workers.tracing import Tracing, ids_of, provider
from workflows.contracts import EpisodeInput, EpisodeKind
from workflows.registry import ON_EPISODES

HISTORY = FOLDER / "current/episode-success.json"


class Seen(NamedTuple):
    name: str
    by: str
    trace_id: int
    span_id: int
    parent_id: int
    begin: int
    end: int
    attributes: dict[str, Any]


class Collector:
    """What an OTLP/HTTP collector gets."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            named = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Seen(
                            name=span.name,
                            by=named["service.instance.id"],
                            trace_id=int.from_bytes(span.trace_id),
                            span_id=int.from_bytes(span.span_id),
                            parent_id=int.from_bytes(span.parent_span_id),
                            begin=span.start_time_unix_nano,
                            end=span.end_time_unix_nano,
                            attributes={item.key: item.value.string_value for item in span.attributes},
                        )
                    )


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def episode() -> EpisodeInput:
    return EpisodeInput(
        run=unique("run"),
        group_id=unique("g"),
        index=1,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TASK_REF,
        limits=limits(),
        seed=7,
    )


async def play(home: Path, input: EpisodeInput, world: World) -> str:
    """Play it with one process for workflow and another for activities, where each workflow task begins with a replay;
    the run id of its execution."""
    queue = unique("queue")
    async with local_server() as plain, AsyncExitStack() as stack:
        clients = []
        for role in ("rollout", "sandbox"):
            told = await stack.enter_async_context(telemetry(Settings(home=home, metrics_port=0), role))
            target = plain.service_client.config.target_host
            clients.append(
                await Client.connect(target, plugins=[plugin(interceptors=told.interceptors)], runtime=told.runtime)
            )
        workflows, activities = clients
        worker = Worker(workflows, task_queue=queue, workflows=ON_EPISODES, max_cached_workflows=0)
        await stack.enter_async_context(worker)
        await stack.enter_async_context(Worker(activities, task_queue=queue, activities=world.activities))
        # Started as by the `temporal` command, which knows nothing of traces.
        handle = await plain.start_workflow("Episode", input, id=input.attempt_id, task_queue=queue)
        await handle.result()
        return handle.first_execution_run_id or ""


async def test_an_attempts_spans_are_one_trace_across_workers_and_replays(tmp_path: Path, collector: Collector) -> None:
    world, input = World(), episode()
    run_id = await play(tmp_path, input, world)
    spans, ids = collector.spans, ids_of(input.attempt_id, run_id)
    assert {span.trace_id for span in spans} == {ids.trace_id}
    (root,) = (span for span in spans if not span.parent_id)
    (record,) = world.calls["record_episode"]
    assert (root.name, root.span_id) == ("Episode", ids.root_id)
    assert (root.begin, root.end) == (round(record.started_at * 1e9), round(record.ended_at * 1e9))
    assert root.attributes["ratchet.attempt"] == input.attempt_id
    assert root.attributes["ratchet.outcome"] == record.outcome.value
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert all(span is root or span.parent_id in by_id for span in spans)
    names = [span.name for span in spans]
    assert names.count("RunWorkflow:Episode") == 1
    for activity, calls in (("acquire", 1), ("generate", 2), ("act", 1), ("verify", 1), ("release", 1)):
        assert names.count(f"RunActivity:{activity}") == names.count(f"StartActivity:{activity}") == calls, activity
    for span in spans:
        if span.name.startswith("RunActivity:"):
            started = by_id[span.parent_id]
            assert (span.by, started.by) == ("sandbox@local", "rollout@local")
            assert started.name == span.name.replace("Run", "Start", 1)


async def test_a_sampler_decides_for_the_whole_trace(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    await play(tmp_path, episode(), World())
    assert collector.spans == []


async def test_a_replay_makes_no_span_and_is_not_disturbed() -> None:
    spans = InMemorySpanExporter()
    tracing = Tracing(provider(Settings(), "rollout", SimpleSpanProcessor(spans)))
    replayer = Replayer(workflows=[ReplayedEpisode], plugins=[plugin(interceptors=[tracing])])
    await replayer.replay_workflow(history(HISTORY))
    assert spans.get_finished_spans() == ()


def test_the_standard_variables_turn_it_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert otlp_protocol() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    assert otlp_protocol() == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert otlp_protocol() == "grpc"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert otlp_protocol() is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert otlp_protocol() is None


def test_the_names_of_the_environment_go_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provider(Settings(), "control").resource.attributes["service.name"] == "ratchet"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    attributes = provider(Settings(), "control").resource.attributes
    assert (attributes["service.name"], attributes["deployment.environment"]) == ("training", "lab")
    assert attributes["service.instance.id"] == "control@local"
