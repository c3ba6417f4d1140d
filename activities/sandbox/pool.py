"""The warm pool: sandboxes that were started before anyone asked, so that none is started while an episode waits.

Owns how many there are and when they go. Promises: a sandbox of the pool ran nothing but its first process; starting
one waits for those whom somebody waits for; none is older than `MOST_AGE_S` when it is taken; what a dead worker of
this host left becomes another's, which uses it or takes it away. What is taken is an attempt's like any other
(`Members`). Called by `DockerBackend`; `docs/decisions/0007-warm-pool.md` says why it is as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from activities.sandbox.channel import ChannelLost, until_ready
from activities.sandbox.container import SandboxSpec
from activities.sandbox.containers import TRANSPORT, Containers, Recipe
from activities.sandbox.daemon import whole
from activities.sandbox.demand import FLOOR, HISTORY_S, Water, peak, waters
from activities.sandbox.members import Member, Members
from workflows.errors import RatchetError, SandboxError

log = logging.getLogger(__name__)

KIND = "pool"
MOST_AGE_S = 1800.0
"""Less than the janitor leaves to what is nobody's."""
UNREADY_S = 120.0
"""Whoever was starting or removing one for so long is dead."""
UNASKED_S = 120.0
"""How long a dead worker's sandboxes wait for the first who asks for their kind."""
AT_ONCE = 2
"""Started at the same time: leaves room at the daemon for who comes meanwhile."""
LOOK_S = 5.0
FAILED_S = 10.0
"""Pause after one could not be started."""
READY_S = 10.0
FIRST_START_S = 0.5
"""What a start is taken to last until one was measured."""


class Demand:
    """What was asked for of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._arrivals: deque[float] = deque()

    @property
    def last(self) -> float:
        return self._arrivals[-1] if self._arrivals else 0.0

    def note(self, now: float) -> None:
        self._arrivals.append(now)

    def peak(self, now: float, window_s: float) -> int:
        while self._arrivals and now - self._arrivals[0] > HISTORY_S:
            self._arrivals.popleft()
        return peak(list(self._arrivals), window_s)


class WarmPool:
    """At most `bound` members on this host, whoever started them; `remove` takes one away with its container."""

    def __init__(
        self, members: Members, containers: Containers, bound: int, remove: Callable[[str], Awaitable[None]]
    ) -> None:
        self._members = members
        self._containers = containers
        self._bound = bound
        self._remove = remove
        self._demands: dict[str, Demand] = {}
        self._starting: dict[asyncio.Task[None], str] = {}
        self._mine: set[str] = set()
        self._wake = asyncio.Event()
        self._start_s = FIRST_START_S
        self._rests_until = 0.0
        self._complained: type[BaseException] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def take(self, sandbox_id: str, recipe: Recipe, labels: dict[str, str]) -> dict[str, str] | None:
        """The labels of a sandbox that is `sandbox_id` from now on; None where none is ready."""
        self._demand(recipe).note(time.monotonic())
        taken = await asyncio.to_thread(self._members.take, recipe.key, sandbox_id, labels, most_age_s=MOST_AGE_S)
        self._wake.set()
        return taken

    def keep(self, spec: SandboxSpec) -> None:
        """Begin to keep the pool full; `spec` is what will be asked for, as far as one knows."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(spec))

    async def aclose(self) -> None:
        """Take away what this process started, or one that is dead, and nobody took."""
        if self._keeper is None:
            return
        for task in (self._keeper, *self._starting):
            task.cancel()
        await asyncio.gather(self._keeper, *self._starting, return_exceptions=True)
        orphans = await asyncio.to_thread(self._members.orphans)
        await asyncio.gather(*(self._gone(member) for member in self._mine | orphans))
        self._members.disown()

    def _demand(self, recipe: Recipe) -> Demand:
        return self._demands.setdefault(recipe.key, Demand(recipe))

    async def _keep(self, spec: SandboxSpec) -> None:
        while True:
            self._wake.clear()
            try:
                if not self._demands:
                    self._demand(await self._containers.recipe(spec))
                await self._round()
            except (RatchetError, OSError) as error:
                self._complain(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    async def _round(self) -> None:
        """Take away what is old or too much, begin to start what is missing."""
        orphans = await asyncio.to_thread(self._members.orphans)
        self._mine |= orphans
        mine = set(self._mine)
        ready, unready = await asyncio.to_thread(lambda: (self._members.ready(), self._members.unready()))
        water = self._waters(time.monotonic())
        going = outdated(ready, water, mine)
        going += [member.id for member in unready if member.age_s > UNREADY_S or member.id in orphans]
        await asyncio.gather(*(self._gone(member) for member in going))
        self._mine -= mine - {member.id for members in ready.values() for member in members}
        total = sum(map(len, ready.values())) + max(len(unready), len(self._starting)) - len(going)
        if time.monotonic() < self._rests_until:
            return
        for key, level in water.items():
            have = len(ready.get(key, [])) + list(self._starting.values()).count(key)
            while have < level.low and total < self._bound and len(self._starting) < AT_ONCE:
                task = asyncio.create_task(self._start(self._demands[key].recipe))
                self._starting[task] = key
                task.add_done_callback(self._started)
                have, total = have + 1, total + 1

    def _waters(self, now: float) -> dict[str, Water]:
        latest = sorted(self._demands.items(), key=lambda item: -item[1].last)
        window_s = max(FLOOR / AT_ONCE * self._start_s, 1.0)
        return waters({key: demand.peak(now, window_s) for key, demand in latest}, self._bound)

    async def _start(self, recipe: Recipe) -> None:
        await self._containers.calm()
        # Whole: a container that is half made when this process ends would be nobody's.
        await whole(self._boot(recipe))

    async def _boot(self, recipe: Recipe) -> None:
        labels = self._containers.labels(recipe, {"kind": KIND})
        member, box = await asyncio.to_thread(self._members.make, labels)
        began = time.monotonic()
        try:
            found = await self._containers.create(member, recipe, box, labels)
            if found is None:
                raise SandboxError(f"container {member} was not made: its image or itself was removed meanwhile")
            await self._containers.start(member)
            await until_ready(self._containers.channel(member, box, labels[TRANSPORT]), READY_S)
            await asyncio.to_thread(
                self._members.offer, member, recipe.key, container_id=str(found["Id"]), image_id=str(found["Image"])
            )
        except (ChannelLost, SandboxError) as error:
            await self._gone(member)
            raise SandboxError(f"{member} does not come up: {error}") from error
        self._mine.add(member)
        self._complained = None
        self._start_s += 0.3 * (time.monotonic() - began - self._start_s)

    def _started(self, task: asyncio.Task[None]) -> None:
        del self._starting[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._rests_until = time.monotonic() + FAILED_S
            self._complain(error)
        self._wake.set()

    def _complain(self, error: BaseException) -> None:
        """Once while it is away: the pool tries again every few seconds."""
        if type(error) is not self._complained:
            self._complained = type(error)
            log.warning("the warm pool can't start a sandbox: %s", error)

    async def _gone(self, member: str) -> None:
        try:
            await self._remove(member)
        except SandboxError as error:
            log.warning("a sandbox of the warm pool is left to the janitor: %s", error)


def outdated(ready: dict[str, list[Member]], water: dict[str, Water], mine: Collection[str]) -> list[str]:
    """Members that are too old; of this process's own also those above their key's high water, and those of a key that
    nobody has asked for here a while after they were started. What others keep goes by its age."""
    going = []
    for key, members in ready.items():
        young = sorted((member for member in members if member.age_s < MOST_AGE_S), key=lambda member: member.age_s)
        going += [member.id for member in members if member.age_s >= MOST_AGE_S]
        if key in water:
            going += [member.id for member in young[water[key].high :] if member.id in mine]
        else:
            going += [member.id for member in young if member.id in mine and member.age_s >= UNASKED_S]
    return going
