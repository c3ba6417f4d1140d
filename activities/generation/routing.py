"""Which engine answers a request, and when: affinity and bounds of placement.py within the limits of pressure.py.

An engine is in rotation for a run while it answers and its label says proven weights of that run. Requests for which
there is no room wait here, before they are anybody's: the higher priority first, then turns of running episodes, whose
cache is warm, then first turns; within each, older episodes first. Waiting for room has no limit of its own and is
nobody's failure: what runs ends, and the activity beats meanwhile. Waiting for an engine in rotation is bounded.

Nothing is remembered of a session: where its last turn was made comes with the request, so that a new worker decides
like the one that died. Called by generate.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from activities.generation.affinity import Affinity
from activities.generation.engine import EngineClient
from activities.generation.placement import Load, place, return_to
from activities.generation.rotation import Door, Seat
from activities.generation.router import RouterClient
from workflows.contracts import EngineInfo, KvPlan
from workflows.errors import EngineError

LOOK_EVERY_S = 0.25
PINNED_WAIT_S = 10.0
"""The same of a request for one version while every engine serves, and none of them that version: whoever pinned it
has to bring it back."""
WAIT_S = 90.0
"""How long a request waits for an engine in rotation: most restarts. The activity's retries outlast the rest."""


class Cached(NamedTuple):
    """Where an episode's last turn was made, and the version that made its last token."""

    engine: str
    version: int


@dataclass(frozen=True)
class Ask:
    """What is known of a request before it is placed. `last` None is a first turn."""

    run: str
    affinity: Affinity
    last: Cached | None = None
    priority: int = 0
    """Lower goes first."""
    started_at: float = 0.0
    """When the attempt began, seconds since the epoch."""
    kv: KvPlan = KvPlan.DROP
    """What it may find in a cache of earlier weights."""
    version: int | None = None
    """The only version that may answer it; None: any that serves the run."""


@dataclass(frozen=True)
class Grant:
    """Leave to send one request."""

    client: EngineClient
    witnesses: list[EngineClient]
    """The engines that may answer it: they are asked for the proof of what made its tokens."""
    cache_salt: str
    labels: frozenset[str]
    """The weights for which that is the salt: what the engines carried when they were last asked."""
    waited_s: float
    door: Door

    def suspect(self) -> None:
        """The request failed: ask its engine again before it gets another one."""
        self.door.suspect()


@dataclass(eq=False)
class _Waiter:
    ask: Ask
    ticket: int
    since: float
    granted: asyncio.Future[Grant]
    unserved_since: float | None = None
    """Since when no engine has been in rotation for it."""

    @property
    def rank(self) -> tuple[int, bool, float, int]:
        return self.ask.priority, self.ask.last is None, self.ask.started_at, self.ticket


class EnginePool:
    """The engines of all hosts; an async context manager that closes their clients. With `router`, the address of an
    external router, requests go there and it places them."""

    def __init__(
        self,
        engines: Sequence[EngineInfo],
        *,
        router: str = "",
        wait_s: float = WAIT_S,
        connect: Callable[[EngineInfo], EngineClient] = EngineClient,
    ) -> None:
        self._seats = [Seat(connect(info)) for info in engines]
        self._router = RouterClient(router) if router else None
        self._doors = (
            [Door(self._router, self._seats)] if self._router else [Door(seat.client, [seat]) for seat in self._seats]
        )
        self._wait_s = wait_s
        self._waiting: list[_Waiter] = []
        self._tickets = itertools.count()
        self._watching: asyncio.Task[None] | None = None

    @property
    def doors(self) -> Sequence[Door]:
        """Where requests go, with the load of each as this worker sees it."""
        return self._doors

    @property
    def waiting(self) -> int:
        """Requests that no engine has room for."""
        return len(self._waiting)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for door in self._doors:
            await door.close()
        for seat in self._seats:
            await seat.close()
        if self._router is not None:
            await self._router.close()

    @asynccontextmanager
    async def engine(self, ask: Ask) -> AsyncIterator[Grant]:
        """Leave to send a request, which is over with the block.

        Raises EngineError, retryable, when no engine comes (back) into rotation in time.
        """
        grant = await self._admitted(ask)
        try:
            yield grant
        finally:
            grant.door.give_back()
            self._dispatch()

    async def _admitted(self, ask: Ask) -> Grant:
        waiter = _Waiter(ask, next(self._tickets), time.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            if not any(seat.fresh and seat.serves(ask.run, ask.version) for seat in self._seats):
                await self._look()
            self._dispatch()
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                waiter.granted.result().door.give_back()
                self._dispatch()
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    async def _look(self) -> None:
        await asyncio.gather(*(seat.look() for seat in self._seats))

    async def _watch(self) -> None:
        """While requests wait or are under way: keep the figures and the labels fresh, and send on who may go."""
        while self._waiting or any(door.in_flight for door in self._doors):
            for door in self._doors:
                door.measure()
            if self._waiting:
                await self._look()
                self._dispatch()
                self._give_up()
            await asyncio.sleep(LOOK_EVERY_S)

    def _dispatch(self) -> None:
        """Grant what can be granted, in the order of rank."""
        now = time.monotonic()
        for waiter in sorted(self._waiting, key=lambda waiter: waiter.rank):
            if not any(door.room for door in self._doors):
                return
            if not waiter.granted.done() and (door := self._placed(waiter.ask, now - waiter.since)) is not None:
                door.take()
                witnesses = [seat.client for seat in door.seats]
                salt = waiter.ask.run if waiter.ask.kv is KvPlan.KEEP else door.salt()
                waiter.granted.set_result(Grant(door.client, witnesses, salt, door.labels, now - waiter.since, door))

    def _placed(self, ask: Ask, waited_s: float) -> Door | None:
        serving = {door.name: door for door in self._doors if door.serves(ask.run, ask.version)}
        if not serving:
            return None
        loads = [Load(door.name, door.requests, door.room) for door in serving.values()]
        prefix, last = ask.affinity.prefix, ask.last
        if last is not None and last.engine in serving and serving[last.engine].carries(ask.run, last.version):
            name = return_to(last.engine, prefix, loads, waited_s=waited_s)
        else:
            name = place(prefix, loads)
        return serving[name] if name is not None else None

    def _give_up(self) -> None:
        """An error for those for whom no engine has been in rotation for too long."""
        now = time.monotonic()
        for waiter in self._waiting:
            run, version = waiter.ask.run, waiter.ask.version
            if any(door.serves(run, version) for door in self._doors):
                waiter.unserved_since = None
                continue
            waiter.unserved_since = waiter.unserved_since or now
            moved_on = version is not None and bool(self._seats) and all(seat.settled for seat in self._seats)
            wait_s = min(PINNED_WAIT_S, self._wait_s) if moved_on else self._wait_s
            if now - waiter.unserved_since > wait_s and not waiter.granted.done():
                found = "; ".join(seat.describe() for seat in self._seats) or "none is configured"
                wanted = run if version is None else f"version {version} of {run}"
                message = f"no engine serves {wanted} after {wait_s:.0f} s: {found}"
                waiter.granted.set_exception(EngineError(message, retryable=not moved_on))
