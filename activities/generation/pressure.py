"""How many requests an engine may have in flight: more while it has room, fewer once it runs out of cache.

Additive increase, multiplicative decrease, as congestion control has it: several workers that share an engine each
follow the rule and come to fair shares without a word between them. Pure rules; routing.py reads the figures once a
second and applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from activities.generation.server import MAX_SEQUENCES

FIRST = 32
"""The limit before the first reading, and the static one where an engine shows no figures."""
LEAST = 1
MOST = MAX_SEQUENCES
"""Above it an engine would only queue, and its queue knows nothing of episodes."""
RISE = 4
"""More requests per reading that found the limit used up and no pressure."""
FALL = 0.7
"""What is left of the requests in flight after pressure."""
HIGH_KV_USAGE = 0.9
"""Above it the requests that run will need blocks that others hold: preemptions are next."""
FIGURES = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
)
"""vLLM's names, in the order of Pressure's fields."""


class Pressure(NamedTuple):
    """What an engine says of itself at one moment."""

    kv_usage: float
    """Share of its cache blocks that requests hold, 0 to 1; blocks that are merely kept for reuse are free."""
    preemptions: int
    """Requests that lost their blocks to others since the engine started."""
    waiting: int
    running: int

    @classmethod
    def parse(cls, page: str) -> Self:
        """From vLLM's `/metrics` page. Raises ValueError, naming the figure, where one is missing."""
        found: dict[str, list[float]] = {name: [] for name in FIGURES}
        for line in page.splitlines():
            name = line.split("{", 1)[0].split(" ", 1)[0]
            if name in found:
                found[name].append(float(line.rsplit(" ", 1)[1]))
        if missing := [name for name, values in found.items() if not values]:
            raise ValueError(f"no {', '.join(missing)} among the metrics")
        # A server with several engine cores has a line for each.
        usages, *counts = found.values()
        return cls(max(usages), *(int(sum(values)) for values in counts))

    @classmethod
    def together(cls, parts: Sequence[Pressure]) -> Self:
        """Of several engines behind one door: the fullest cache, and the sums. `parts` is not empty."""
        usages, *counts = zip(*parts, strict=True)
        return cls(max(usages), *(sum(values) for values in counts))


def next_limit(limit: int, *, most: int, in_flight: int, used_up: bool, before: Pressure | None, now: Pressure) -> int:
    """The limit after a reading, within LEAST and `most`.

    `in_flight` are this worker's requests, `used_up` whether they had reached the limit since the reading `before`,
    which is None where a counter can't be compared. It falls from what is in flight, since room that nobody used is no
    cause of the pressure, and only once an earlier fall has taken effect: requests that run are let run, and one
    shortage would be answered at every reading until they end. Requests that wait in the engine keep it from rising.
    """
    preempted = before is not None and now.preemptions > before.preemptions
    if preempted or now.kv_usage > HIGH_KV_USAGE:
        if 0 < in_flight <= limit:
            limit = int(FALL * in_flight)
    elif used_up and not now.waiting:
        limit += RISE
    return max(LEAST, min(limit, most))
