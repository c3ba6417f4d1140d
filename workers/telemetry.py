"""A worker's telemetry: where Prometheus finds its metrics, and where its spans go.

Owns the endpoint: the SDK's own and ours on one port, which its core serves. Promises that a port that somebody else
holds ends no worker, and that whoever looks finds the one in use (workers/stack/endpoints.py). Called by whoever starts
a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from temporalio.runtime import PrometheusConfig, Runtime
from temporalio.worker import Interceptor

from workers.metrics import BUCKETS, Meters, MetricsInterceptor, Source, sample
from workers.settings import Settings, otlp_protocol
from workers.stack.endpoints import port_of, show
from workers.stack.ports import free_ports, is_free
from workers.temporal import runtime

if TYPE_CHECKING:
    from workers.tracing import Tracing

log = logging.getLogger(__name__)


class Telemetry:
    """What one worker's process measures with. Without an endpoint nothing is measured; without a collector no span is
    made."""

    def __init__(self, runtime: Runtime, *, address: str = "", tracing: Tracing | None = None) -> None:
        self.runtime = runtime
        self.address = address
        """`host:port` of the endpoint; empty for none."""
        self.interceptors: list[Interceptor] = []
        self._sources: list[Source] = []
        self._meters = Meters(runtime.metric_meter)
        if tracing is not None:
            self.interceptors.append(tracing)
        if address:
            self.interceptors.append(MetricsInterceptor(self._meters))

    def watch(self, source: Source) -> None:
        """Have the gauges of `source` follow it."""
        self._sources.append(source)

    async def sample(self) -> None:
        if self.address:
            await sample(self._meters, self._sources)


@asynccontextmanager
async def telemetry(settings: Settings, role: str) -> AsyncIterator[Telemetry]:
    """The telemetry of a worker's process, found by others for as long as the block lasts."""
    traces = _tracing(settings, role)
    made, address = _serving(settings, role)
    found = Telemetry(made, address=address, tracing=traces)
    file = show(settings, role, address) if address else None
    sampling = asyncio.create_task(found.sample())
    try:
        yield found
    finally:
        sampling.cancel()
        if file is not None:
            file.unlink(missing_ok=True)
        if traces is not None:
            await asyncio.to_thread(traces.close)


def _tracing(settings: Settings, role: str) -> Tracing | None:
    """The tracing that the environment asks for; None where it asks for none, at the price of no import."""
    protocol = otlp_protocol()
    if protocol is None:
        return None
    from workers.tracing import exporting

    return exporting(settings, role, protocol)


def _serving(settings: Settings, role: str) -> tuple[Runtime, str]:
    """A runtime that serves metrics, and where; without an endpoint where none is wanted or none can be had."""
    for port in _candidates(port_of(settings, role)):
        address = f"{settings.metrics_host}:{port}"
        serving = PrometheusConfig(address, durations_as_seconds=True, histogram_bucket_overrides=BUCKETS)
        try:
            made = runtime(serving)
        except (RuntimeError, ValueError) as error:
            log.warning("%s: no metrics at %s: %s", role, address, error)
            continue
        log.info("%s: metrics at http://%s/metrics", role, address)
        return made, address
    return runtime(), ""


def _candidates(wanted: int) -> Sequence[int]:
    if not wanted:
        return []
    if is_free(wanted):
        return [wanted, *free_ports(1)]
    log.warning("port %d for metrics is taken: another one is used (RATCHET_METRICS_PORT chooses the first)", wanted)
    return free_ports(2)
