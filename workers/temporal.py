"""One plugin for every client, worker and replayer: the converter, the sandbox's pass-through and the interceptor.

The interceptor beats for every activity that has a heartbeat time-out, and names failures: a RatchetError becomes an
ApplicationError of its FailureType, retryable as the error says, so that workflows read types and never messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from temporalio import activity
from temporalio.client import Client
from temporalio.converter import PayloadCodec
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.service import GrpcCompression
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    ReplayerConfig,
    UnsandboxedWorkflowRunner,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workers.handover import Notes
from workers.settings import Settings, temporal_profile
from workers.versioning import workflow_digest
from workflows.converter import data_converter, sealed_by
from workflows.errors import RatchetError

if TYPE_CHECKING:
    from workers.telemetry import Telemetry

log = logging.getLogger(__name__)
BEATS_PER_TIMEOUT = 3
LOOPBACK = ("127.", "localhost:")


class _NamedActivities(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, notes: Notes | None) -> None:
        super().__init__(next)
        self._notes = notes

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        with self._notes.of(activity.info().task_token) if self._notes else nullcontext():
            async with beating():
                try:
                    return await super().execute_activity(input)
                except RatchetError as error:
                    raise named(error) from error


def named(error: RatchetError) -> ApplicationError:
    """The failure as workflows read it: its type, whether it is final, and the evidence as its details."""
    details = [error.evidence] if error.evidence else []
    return ApplicationError(str(error), *details, type=error.failure, non_retryable=not error.retryable)


class RatchetInterceptor(Interceptor):
    """`notes`: where a worker's process writes down what it has in hand (workers/handover.py)."""

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = notes

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _NamedActivities(next, self._notes)


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Heartbeats at a third of the time-out, which name the host: a later time-out carries it. The first comes only
    after that third: each beat is a call and a write on the server, and most activities end before."""
    timeout = activity.info().heartbeat_timeout
    if not timeout:
        yield
        return
    where = {"host": socket.gethostname(), "pid": os.getpid()}

    async def pulse() -> None:
        while True:
            await asyncio.sleep(timeout.total_seconds() / BEATS_PER_TIMEOUT)
            activity.heartbeat(where)

    beat = asyncio.create_task(pulse())
    try:
        yield
    finally:
        beat.cancel()


def _runner(existing: WorkflowRunner | None) -> WorkflowRunner:
    """Our workflow modules are deterministic by test, so that the sandbox needn't import them anew per workflow."""
    if isinstance(existing, SandboxedWorkflowRunner):
        restrictions = SandboxRestrictions.default.with_passthrough_modules(
            "workflows", "pydantic", "pydantic_core", "opentelemetry"
        )
        return SandboxedWorkflowRunner(restrictions=restrictions)
    if existing is None:
        raise ValueError("a worker has a workflow runner")
    return existing


class RatchetPlugin(SimplePlugin):
    """A worker or replayer without a build of its own gets the workflows' digest as one: the SDK would hash every
    module that is loaded, which makes transformers load all that it puts off, torch too, for a dozen seconds at each
    start."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config = super().configure_worker(config)
        if not config.get("deployment_config") and not config.get("build_id"):
            config["build_id"] = workflow_digest()
        return config

    def configure_replayer(self, config: ReplayerConfig) -> ReplayerConfig:
        config = super().configure_replayer(config)
        if not config.get("build_id"):
            config["build_id"] = workflow_digest()
        return config


def plugin(
    *,
    sandboxed: bool = True,
    notes: Notes | None = None,
    interceptors: Sequence[Interceptor] = (),
    codec: PayloadCodec | None = None,
) -> SimplePlugin:
    """What makes a client, a worker and a replayer one. `sandboxed` False plays workflows without the SDK's sandbox, at
    a quarter less of the worker's time; tests and replays keep it, so that it says what it forbids before a deploy.
    `interceptors` go before ours: they see failures by their names. `codec` seals what the server gets to see."""
    return RatchetPlugin(
        "ratchet",
        data_converter=sealed_by(codec) if codec else data_converter,
        interceptors=[*interceptors, RatchetInterceptor(notes)],
        workflow_runner=_runner if sandboxed else UnsandboxedWorkflowRunner(),
    )


def runtime(metrics: PrometheusConfig | None = None) -> Runtime:
    """Core's log lines go through Python's logging: printed JSON stays clean. Raises RuntimeError where `metrics` can't
    be served."""
    forwarding = LogForwardingConfig(logger=logging.getLogger("temporalio.core"))
    levels = TelemetryFilter(core_level="WARN", other_level="ERROR")
    logs = LoggingConfig(filter=levels, forwarding=forwarding)
    return Runtime(telemetry=TelemetryConfig(logging=logs, metrics=metrics))


def credentials(settings: Settings) -> dict[str, Any]:
    """API key, TLS and metadata of the SDK's environment configuration, for the server that they are meant for: the one
    that it names, or where it names none any that is not on this machine. No other server is shown a key."""
    profile = temporal_profile()
    here = settings.temporal_address.startswith(LOOPBACK)
    if profile.address != settings.temporal_address and (profile.address or here):
        return {}
    given = profile.to_client_connect_config()
    return {name: value for name, value in given.items() if name in ("api_key", "tls", "rpc_metadata")}


def codec_of(settings: Settings) -> PayloadCodec | None:
    """Raises InvalidConfig for keys that are none."""
    if not (keys := settings.payload_keys.get_secret_value()):
        return None
    from workers.codec import SealedPayloads

    return SealedPayloads.parse(keys)


async def connect(
    settings: Settings,
    *,
    role: str = "cli",
    sandboxed: bool = True,
    notes: Notes | None = None,
    telemetry: Telemetry | None = None,
) -> Client:
    """A client of the stack's server, and how its workers play workflows. Raises RuntimeError where none answers,
    InvalidConfig for `payload_keys` that are none."""
    # Compressing what never leaves the machine only costs time.
    local = settings.temporal_address.startswith(LOOPBACK)
    interceptors = telemetry.interceptors if telemetry else ()
    return await Client.connect(
        settings.temporal_address,
        **credentials(settings),
        grpc_compression=GrpcCompression.NONE if local else GrpcCompression.GZIP,
        namespace=settings.temporal_namespace,
        identity=f"{role}@{settings.host}:{os.getpid()}",
        plugins=[plugin(sandboxed=sandboxed, notes=notes, interceptors=interceptors, codec=codec_of(settings))],
        runtime=telemetry.runtime if telemetry else runtime(),
    )
