"""One plugin for every client, worker and replayer: the converter, the sandbox's pass-through and the interceptor.

The interceptor beats for every activity that has a heartbeat time-out, and names failures: a RatchetError becomes an
ApplicationError of its FailureType, retryable as the error says, so that workflows read types and never messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import GrpcCompression
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    UnsandboxedWorkflowRunner,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workers.handover import Notes
from workers.settings import Settings
from workers.versioning import workflow_digest
from workflows.converter import data_converter
from workflows.errors import RatchetError

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
        restrictions = SandboxRestrictions.default.with_passthrough_modules("workflows", "pydantic", "pydantic_core")
        return SandboxedWorkflowRunner(restrictions=restrictions)
    if existing is None:
        raise ValueError("a worker has a workflow runner")
    return existing


class RatchetPlugin(SimplePlugin):
    """A worker without a build of its own gets the workflows' digest as one: the SDK would hash every module that is
    loaded, which makes transformers load all that it puts off, torch too, for a dozen seconds at each start."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config = super().configure_worker(config)
        if not config.get("deployment_config") and not config.get("build_id"):
            config["build_id"] = workflow_digest()
        return config


def plugin(*, sandboxed: bool = True, notes: Notes | None = None) -> SimplePlugin:
    """What makes a client, a worker and a replayer one. `sandboxed` False plays workflows without the SDK's sandbox, at
    a quarter less of the worker's time; tests and replays keep it, so that it says what it forbids before a deploy."""
    return RatchetPlugin(
        "ratchet",
        data_converter=data_converter,
        interceptors=[RatchetInterceptor(notes)],
        workflow_runner=_runner if sandboxed else UnsandboxedWorkflowRunner(),
    )


def runtime() -> Runtime:
    """Core's log lines go through Python's logging: printed JSON stays clean."""
    forwarding = LogForwardingConfig(logger=logging.getLogger("temporalio.core"))
    telemetry = TelemetryFilter(core_level="WARN", other_level="ERROR")
    return Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=telemetry, forwarding=forwarding)))


async def connect(
    settings: Settings, *, role: str = "cli", sandboxed: bool = True, notes: Notes | None = None
) -> Client:
    """A client of the stack's server, and how its workers play workflows. Raises RuntimeError where none answers."""
    # Compressing what never leaves the machine only costs time.
    local = settings.temporal_address.startswith(LOOPBACK)
    return await Client.connect(
        settings.temporal_address,
        grpc_compression=GrpcCompression.NONE if local else GrpcCompression.GZIP,
        namespace=settings.temporal_namespace,
        identity=f"{role}@{settings.host}:{os.getpid()}",
        plugins=[plugin(sandboxed=sandboxed, notes=notes)],
        runtime=runtime(),
    )
