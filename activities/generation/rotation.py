"""The engines as routing sees them: what each serves, how busy it is, and how much more a worker may send it.

A Seat is one engine with the label last seen of it. A Door is where requests go: to one engine, or through an external
router to all of them; it has the limit that follows the engines' pressure. Used by routing.py alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence

from activities.generation.engine import EngineClient
from activities.generation.pressure import FIRST, MOST, Pressure, next_limit
from workflows.contracts import CLOSING, parse_policy_label, policy_label
from workflows.errors import EngineError

FRESH_S = 0.5
"""How long a label is believed; what made a token is read from the answer, never from here."""
ANSWER_S = 1.0
"""How long anybody waits for the answer of an engine about its label."""
MEASURE_EVERY_S = 1.0
OLD_S = 5.0
"""A reading of which nothing is concluded any more."""

log = logging.getLogger(__name__)


class Seat:
    """One engine and what was last seen of it."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.label = ""
        self._fault = "not asked yet"
        self._seen = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Renew the label unless it is fresh. An engine that hangs holds nobody up: what was last seen of it stands
        until it answers or the question fails. Callers that come together ask once."""
        if self.fresh:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait([self._asking], timeout=ANSWER_S)

    async def look_again(self) -> None:
        """Renew the label, however fresh: what was seen may be older than what is to be judged by it."""
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=ANSWER_S)
        self._seen = float("-inf")
        await self.look()

    async def _ask(self) -> None:
        try:
            self.label, self._fault = await self.client.label(), ""
        except EngineError as error:
            self.label, self._fault = "", str(error)
        self._seen = time.monotonic()

    def forget(self) -> None:
        self.label, self._seen = "", float("-inf")

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self.client.close()

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self._seen < FRESH_S

    def serves(self, run: str, version: int | None = None) -> bool:
        """Whether it serves proven weights of the run, and of this version where one is asked for."""
        policy = parse_policy_label(self.label)
        if policy is None or policy[0] != run or not policy[2] or self.label.endswith(CLOSING):
            return False
        return version is None or policy[1] == version

    @property
    def settled(self) -> bool:
        """Whether it serves proven weights, whosever they are: nobody has to wait for what becomes of it."""
        policy = parse_policy_label(self.label)
        return policy is not None and policy[2] and not self.label.endswith(CLOSING)

    def describe(self) -> str:
        return self._fault or f"{self.client.info.name} carries {self.label!r}"


class Door:
    """Where requests go. `client` is the engine of the only seat, or a router in front of all of them."""

    def __init__(self, client: EngineClient, seats: Sequence[Seat]) -> None:
        self.client = client
        self.seats = seats
        self.limit = FIRST * len(seats)
        self.in_flight = 0
        self._others = 0
        self._used_up = False
        self._without_figures = False
        self._before: tuple[Pressure, list[str]] | None = None
        self._measured = float("-inf")
        self._measuring: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.client.info.name

    @property
    def requests(self) -> int:
        """In flight, with those that the engines say others have sent."""
        return self.in_flight + self._others

    @property
    def room(self) -> bool:
        return self.in_flight < self.limit

    def serves(self, run: str, version: int | None = None) -> bool:
        return any(seat.serves(run, version) for seat in self.seats)

    def carries(self, run: str, version: int) -> bool:
        """Whether it serves the version still, so that what it cached of it is there."""
        return any(seat.label == policy_label(run, version) for seat in self.seats)

    def salt(self) -> str:
        """Names the weights of every engine behind the door: what was cached under others is never found again."""
        return hashlib.sha256("\n".join(sorted(self.labels)).encode()).hexdigest()[:32]

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(seat.label for seat in self.seats if seat.label)

    def take(self) -> None:
        self.in_flight += 1
        self._used_up = self._used_up or not self.room

    def give_back(self) -> None:
        self.in_flight -= 1

    def suspect(self) -> None:
        for seat in self.seats:
            seat.forget()

    def measure(self) -> None:
        """Begin to read the engines' figures, if the last reading is old enough."""
        if self._measuring is not None and not self._measuring.done():
            return
        age = time.monotonic() - self._measured
        if age > OLD_S:
            self._before, self._others = None, 0
        if age >= MEASURE_EVERY_S:
            self._measuring = asyncio.create_task(self._measure())

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    async def _measure(self) -> None:
        seats = [seat for seat in self.seats if seat.label]
        labels = [seat.label for seat in seats]
        in_flight, used_up, self._used_up = self.in_flight, self._used_up or not self.room, False
        before, self._before = self._before, None
        try:
            read = await asyncio.gather(*(seat.client.pressure() for seat in seats))
        except EngineError as error:
            self._go_without(str(error))
            return
        finally:
            self._measured = time.monotonic()
        if not seats:
            return
        now = Pressure.together(read)
        # A weight load makes the engine preempt what runs: that is no want of room.
        preempted = before is not None and now.preemptions > before[0].preemptions
        await asyncio.gather(*(seat.look_again() if preempted else seat.look() for seat in seats))
        earlier, labels = labels, [seat.label for seat in seats]
        comparable = before is not None and before[1] == labels
        # Where a load came in between, nobody knows which weights the figures were of.
        self._before = (now, labels) if labels == earlier else None
        self._without_figures = False
        # Ours came and went while the engine answered: what may be ours is not taken for others'.
        self._others = max(0, now.running + now.waiting - max(in_flight, self.in_flight))
        self.limit = next_limit(
            self.limit,
            most=MOST * len(self.seats),
            in_flight=self.in_flight,
            used_up=used_up,
            before=before[0] if before is not None and comparable else None,
            now=now,
        )

    def _go_without(self, why: str) -> None:
        self.limit, self._others = min(self.limit, FIRST * len(self.seats)), 0
        if not self._without_figures:
            log.warning("%s shows no pressure: at most %d requests in flight (%s)", self.name, self.limit, why)
        self._without_figures = True
