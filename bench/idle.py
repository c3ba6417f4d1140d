"""How much of the time an engine has nothing to do, asked of the engine itself while something else is measured.

Called by collection.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from statistics import mean

import httpx

EVERY_S = 0.5
_RUNNING = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


def running(metrics: str) -> float:
    """Requests that run in the engine, by its Prometheus text. Raises ValueError for a text that does not say."""
    found = _RUNNING.findall(metrics)
    if not found:
        raise ValueError("no vllm:num_requests_running")
    return sum(map(float, found))


class Idle:
    """Samples of engines, `share` of which found nothing running; the mean over the engines."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._idle: dict[str, list[bool]] = {url: [] for url in urls}

    @property
    def share(self) -> float:
        seen = [mean(map(float, samples)) for samples in self._idle.values() if samples]
        return mean(seen) if seen else 0.0

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Sample for the time of the block."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
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
