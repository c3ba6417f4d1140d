"""How much of the time an engine has nothing to do, asked of the engine itself while something else is measured, and
how busy the machine's processors are meanwhile: where they are all busy, no order of the work makes it faster.

Called by collection.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from statistics import mean

import httpx
import psutil

EVERY_S = 0.5
_RUNNING = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


def running(metrics: str) -> float:
    """Requests that run in the engine, by its Prometheus text. Raises ValueError for a text that does not say."""
    found = _RUNNING.findall(metrics)
    if not found:
        raise ValueError("no vllm:num_requests_running")
    return sum(map(float, found))


class Idle:
    """Samples of engines, `share` of which found nothing running: the mean over the engines, known afterwards."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._idle: dict[str, list[bool]] = {url: [] for url in urls}
        self.share = 0.0
        self.cpu_busy = 0.0
        """Of the time of all processors, the share in which they worked, whoever for."""

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Sample for the time of the block."""
        task, before = asyncio.create_task(self._sample()), psutil.cpu_times()
        try:
            yield
        finally:
            self.cpu_busy = busy_share(before, psutil.cpu_times())
            seen = [mean(map(float, samples)) for samples in self._idle.values() if samples]
            self.share = mean(seen) if seen else 0.0
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sample(self) -> None:
        async with httpx.AsyncClient(timeout=5) as http:
            while True:
                for url in self._urls:
                    # An engine too busy to answer is not idle, and one sample less changes no median.
                    with suppress(httpx.HTTPError, ValueError):
                        self._idle[url].append(running((await http.get(f"{url}/metrics")).text) == 0)
                await asyncio.sleep(EVERY_S)


def busy_share(before: Sequence[float], after: Sequence[float]) -> float:
    """Of the processors' time between two psutil.cpu_times(), the share that was neither idle nor waiting."""
    spent = {
        name: getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system", "irq", "softirq")
    }
    rest = sum(getattr(after, name) - getattr(before, name) for name in ("idle", "iowait", "steal"))
    total = sum(spent.values()) + rest
    return sum(spent.values()) / total if total else 0.0
