"""Which engine answers a session: the same one as before, as long as it serves this run's proven weights.

An engine is in rotation for a run while it answers and its label says proven weights of that run. Sessions are placed
by rendezvous hashing: exact keys, no memory, so that a new worker sends an episode's next turn where its cache is, and
only the sessions of a lost engine move. With no engine in rotation a session waits, bounded. Called by generate.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from activities.generation.engine import EngineClient
from workflows.contracts import EngineInfo, parse_policy_label
from workflows.errors import EngineError

FRESH_S = 0.5
"""How long a label is believed; what made a token is read from the answer, never from here."""
ANSWER_S = 1.0
"""How long a session waits for the answer of an engine about its label."""
LOOK_EVERY_S = 0.25
WAIT_S = 90.0
"""How long a session waits for an engine: most restarts. The activity's retries outlast the rest."""


class _Seat:
    """One engine and what was last seen of it."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._label = ""
        self._fault = "not asked yet"
        self._seen = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Renew the label unless it is fresh. An engine that hangs holds nobody up: what was last seen of it stands
        until it answers or the question fails. Callers that come together ask once."""
        if time.monotonic() - self._seen < FRESH_S:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait([self._asking], timeout=ANSWER_S)

    async def _ask(self) -> None:
        try:
            self._label, self._fault = await self.client.label(), ""
        except EngineError as error:
            self._label, self._fault = "", str(error)
        self._seen = time.monotonic()

    def forget(self) -> None:
        self._label, self._seen = "", float("-inf")

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self.client.close()

    def serves(self, run: str) -> bool:
        policy = parse_policy_label(self._label)
        return policy is not None and policy[0] == run and policy[2]

    def describe(self) -> str:
        return self._fault or f"{self.client.info.name} carries {self._label!r}"


class EnginePool:
    """The engines of all hosts; an async context manager that closes their clients."""

    def __init__(
        self,
        engines: Sequence[EngineInfo],
        *,
        wait_s: float = WAIT_S,
        connect: Callable[[EngineInfo], EngineClient] = EngineClient,
    ) -> None:
        self._seats = [_Seat(connect(info)) for info in engines]
        self._wait_s = wait_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for seat in self._seats:
            await seat.close()

    async def choose(self, run: str, session: str) -> EngineClient:
        """The engine in rotation that this session belongs to.

        Waits for one to come (back) into rotation. Raises EngineError, retryable, when none does in time.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            await asyncio.gather(*(seat.look() for seat in self._seats))
            if serving := [seat for seat in self._seats if seat.serves(run)]:
                return max(serving, key=lambda seat: _weight(session, seat.client.info.name)).client
            if time.monotonic() > deadline:
                found = "; ".join(seat.describe() for seat in self._seats) or "none is configured"
                raise EngineError(f"no engine serves {run} after {self._wait_s:.0f} s: {found}")
            await asyncio.sleep(LOOK_EVERY_S)

    def suspect(self, engine: EngineClient) -> None:
        """Believe nothing of an engine that has just failed: ask it again before it gets another request."""
        for seat in self._seats:
            if seat.client is engine:
                seat.forget()


def _weight(session: str, engine: str) -> bytes:
    return hashlib.sha256(f"{session}\0{engine}".encode()).digest()
