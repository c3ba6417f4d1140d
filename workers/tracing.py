"""OpenTelemetry spans of an episode, across the workers that play it.

An attempt is one trace, whose ids are made from its workflow's: a worker that takes over after a death, a replay and a
late retry go on in the same trace without a word between them. Its root span, from the attempt's begin to its end, is
made when its row is written; activities are its children with their true times, workflow steps are points in between.
Other workflows make no spans of their own, of their activities each is a trace.

Off unless the standard variables name a collector: `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_TRACES_EXPORTER=otlp`. `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER=none`,
`OTEL_EXPORTER_OTLP_*`, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_TRACES_SAMPLER` mean what they always
do.
"""

from __future__ import annotations

import hashlib
import socket
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from temporalio import activity, workflow
from temporalio.contrib.opentelemetry import TracingInterceptor, TracingWorkflowInboundInterceptor
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, WorkflowInterceptorClassInput

from workers.settings import Settings
from workflows.contracts import EpisodeRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

CARRIER = "__ratchet_trace_carrier"
TRACED = "Episode"
SERVICE = "ratchet"
FLUSH_MS = 5000


class TraceIds(NamedTuple):
    """Of one attempt: 128 and 64 bits, never zero."""

    trace_id: int
    root_id: int


_next: ContextVar[TraceIds | None] = ContextVar("ratchet_next_ids", default=None)


def ids_of(workflow_id: str, run_id: str) -> TraceIds:
    """The trace of a workflow's execution and its root span, the same in every process."""
    digest = hashlib.sha256(f"{workflow_id}|{run_id}".encode()).digest()
    return TraceIds(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)


class _AttemptSpans(TracingWorkflowInboundInterceptor):
    """An Episode's steps are below its root span, whoever started it."""

    def _load_workflow_context_carrier(self) -> Any:
        info = workflow.info()
        if info.workflow_type != TRACED:
            return super()._load_workflow_context_carrier()
        if self._workflow_context_carrier is None:
            carrier: Any = workflow.extern_functions()[CARRIER]
            self._workflow_context_carrier = carrier(info.workflow_id, info.first_execution_run_id)
        return self._workflow_context_carrier


class _RootSpan(ActivityInboundInterceptor):
    """Makes the root span of an attempt when its row is written."""

    def __init__(self, next: ActivityInboundInterceptor, tracing: Tracing) -> None:
        super().__init__(next)
        self._tracing = tracing

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        answer = await super().execute_activity(input)
        info, message = activity.info(), input.args[0] if input.args else None
        if isinstance(message, EpisodeRecord) and info.workflow_id and info.workflow_run_id:
            self._tracing.root(message, ids_of(info.workflow_id, info.workflow_run_id))
        return answer


class Tracing(TracingInterceptor):
    """Spans to `provider`, whose ids come from `Ids`."""

    def __init__(self, provider: TracerProvider) -> None:
        super().__init__(provider.get_tracer("ratchet"))
        self._provider = provider

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[TracingWorkflowInboundInterceptor]:
        super().workflow_interceptor_class(input)
        input.unsafe_extern_functions[CARRIER] = self.carrier
        return _AttemptSpans

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _RootSpan(super().intercept_activity(next), self)

    def carrier(self, workflow_id: str, run_id: str) -> dict[str, str]:
        """The W3C header of an attempt's root span. Its trace id decides whether it is sampled, everywhere alike."""
        from opentelemetry.context import Context

        ids = ids_of(workflow_id, run_id)
        decision: Any = self._provider.sampler.should_sample(Context(), ids.trace_id, TRACED).decision
        return {"traceparent": f"00-{ids.trace_id:032x}-{ids.root_id:016x}-{int(decision.is_sampled()):02x}"}

    def root(self, record: EpisodeRecord, ids: TraceIds) -> None:
        from opentelemetry.context import Context

        attributes: dict[str, str | int | float] = {
            "ratchet.run": record.run,
            "ratchet.group": record.group_id,
            "ratchet.attempt": record.attempt_id,
            "ratchet.task": f"{record.task.taskset}/{record.task.task_id}",
            "ratchet.kind": record.kind.value,
            "ratchet.outcome": record.outcome.value,
            "ratchet.stop_reason": record.stop_reason.value,
            "ratchet.turns": len(record.turns),
            "ratchet.sampled_tokens": record.sampled_tokens,
        }
        if record.reward is not None:
            attributes["ratchet.reward"] = record.reward
        token = _next.set(ids)
        try:
            begin, end = round(record.started_at * 1e9), round(record.ended_at * 1e9)
            span = self.tracer.start_span(TRACED, Context(), attributes=attributes, start_time=begin)
        finally:
            _next.reset(token)
        span.end(end)

    def close(self) -> None:
        """Send what is left. Blocks, for some seconds where nobody answers."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


def exporting(settings: Settings, role: str, protocol: str) -> Tracing:
    """Tracing to the collector that the environment names. Raises ValueError for a protocol that there is not."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracing(provider(settings, role, BatchSpanProcessor(_exporter(protocol))))


def provider(settings: Settings, role: str, *processors: Any) -> TracerProvider:
    """A provider whose spans name this process, and whose root spans have the ids of their attempts."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            ids = _next.get()
            return ids.trace_id if ids else super().generate_trace_id()

        def generate_span_id(self) -> int:
            ids = _next.get()
            return ids.root_id if ids else super().generate_span_id()

    names = {"service.instance.id": f"{role}@{settings.host}", "host.name": socket.gethostname(), "ratchet.role": role}
    # What the environment names goes before what we do.
    resource = Resource.create({"service.name": SERVICE, **names}).merge(OTELResourceDetector().detect())
    made = TracerProvider(resource=resource, id_generator=Ids(), shutdown_on_exit=False)
    for processor in processors:
        made.add_span_processor(processor)
    return made


def _exporter(protocol: str) -> SpanExporter:
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol!r}: there are http/protobuf and grpc")
