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
from contextlib import asynccontextmanager
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from workers.settings import Settings
from workflows.converter import data_converter
from workflows.errors import RatchetError

log = logging.getLogger(__name__)
BEATS_PER_TIMEOUT = 3


class _NamedActivities(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        async with _beating():
            try:
                return await super().execute_activity(input)
            except RatchetError as error:
                raise ApplicationError(str(error), type=error.failure, non_retryable=not error.retryable) from error


class RatchetInterceptor(Interceptor):
    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _NamedActivities(next)


@asynccontextmanager
async def _beating() -> AsyncIterator[None]:
    """Heartbeats at a third of the time-out; the first names the host, which a later time-out then carries."""
    timeout = activity.info().heartbeat_timeout
    if not timeout:
        yield
        return
    where = {"host": socket.gethostname(), "pid": os.getpid()}

    async def pulse() -> None:
        while True:
            activity.heartbeat(where)
            await asyncio.sleep(timeout.total_seconds() / BEATS_PER_TIMEOUT)

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


def plugin() -> SimplePlugin:
    """What makes a client, a worker and a replayer one."""
    return SimplePlugin(
        "ratchet",
        data_converter=data_converter,
        interceptors=[RatchetInterceptor()],
        workflow_runner=_runner,
    )


def runtime() -> Runtime:
    """Core's log lines go through Python's logging: printed JSON stays clean."""
    forwarding = LogForwardingConfig(logger=logging.getLogger("temporalio.core"))
    telemetry = TelemetryFilter(core_level="WARN", other_level="ERROR")
    return Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=telemetry, forwarding=forwarding)))


async def connect(settings: Settings, *, role: str = "cli") -> Client:
    """A client of the stack's server. Raises RuntimeError where none answers."""
    return await Client.connect(
        settings.temporal_address,
        namespace=settings.temporal_namespace,
        identity=f"{role}@{settings.host}:{os.getpid()}",
        plugins=[plugin()],
        runtime=runtime(),
    )
