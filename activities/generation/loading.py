"""The activities of an engine's host, `serve` and `apply`, and the keeper that brings a restarted engine back.

Promises: an engine serves what the run asked for or is out of routing; both activities may be repeated at any time.
Called by TrainingRun on the queue `engine@<host>`; the keeper runs beside them in the same process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import Engine
from temporalio import activity

from activities.generation.engine import EngineClient
from activities.generation.loader import NO_OFFERS, EngineLoader, OfferSource
from activities.generation.server import EngineSpec
from activities.generation.serving import end_server, serve
from activities.generation.weights import WeightsCache
from storage.objects import ObjectStore
from workflows.contracts import (
    ApplyInput,
    ApplyOutput,
    EngineInfo,
    RestInput,
    ServeInput,
    ServeOutput,
    Timing,
    policy_label,
)
from workflows.errors import EngineError, RatchetError

START_S = 600.0
"""How long a server may take to answer: the load of a large model on a slow disk."""
LOOK_EVERY_S = 1.0
FIRST_BACKOFF_S = 2.0
LONGEST_BACKOFF_S = 60.0
LOADS_IN_VAIN = 3
"""Loads in a row that an engine that answers could not prove; then its server is started anew."""

log = logging.getLogger(__name__)


class EngineActivities:
    """`home` is the state folder, where launchers read their specs and where weights are kept."""

    def __init__(
        self,
        store: ObjectStore,
        database: Engine,
        home: Path,
        offers: OfferSource = NO_OFFERS,
        *,
        start_s: float = START_S,
        connect: Callable[[EngineInfo], EngineClient] = EngineClient,
    ) -> None:
        self._store = store
        self._database = database
        self.home = home
        self._offers = offers
        self._start_s = start_s
        self._connect = connect
        self._weights = WeightsCache(store, home / "weights")
        self._loaders: dict[EngineInfo, EngineLoader] = {}

    def loader(self, engine: EngineInfo) -> EngineLoader:
        """The one loader of an engine in this process."""
        if engine not in self._loaders:
            client = self._connect(engine)
            self._loaders[engine] = EngineLoader(
                client, self._store, self._weights, self._database, self.home, self._offers
            )
        return self._loaders[engine]

    async def close(self) -> None:
        for loader in self._loaders.values():
            await loader.client.close()

    @activity.defn(name="serve")
    async def serve(self, message: ServeInput) -> ServeOutput:
        """Have the engine serve the model's architecture. Raises EngineError, or InvalidConfig for a bad folder."""
        began = time.monotonic()
        loader = self.loader(message.engine)
        spec = EngineSpec.of(message.model, context_length=message.context_length, dtype=message.dtype)
        async with loader.lock:
            restarted = await serve(loader.client, spec, self.home, wait_s=self._start_s)
        return ServeOutput(engine=message.engine.name, restarted=restarted, seconds=time.monotonic() - began)

    @activity.defn(name="apply")
    async def apply(self, message: ApplyInput) -> ApplyOutput:
        """Load a published version into the engine and prove it; `EngineLoader.apply` says how and what it raises."""
        return await self.loader(message.engine).apply(message)

    @activity.defn(name="rest")
    async def rest(self, message: RestInput) -> Timing:
        """Have the engine give its device to the trainer until the next `apply`. Raises EngineError."""
        began, loader = time.monotonic(), self.loader(message.engine)
        await loader.rest()
        return Timing(run_s=time.monotonic() - began)


class EngineKeeper:
    """Watches this host's engines and loads the last version asked for into one that lost it: after a restart, or
    after a load that failed or that nobody ended. One that can't prove it again and again is started anew. An async
    context manager."""

    def __init__(self, activities: EngineActivities, engines: Sequence[EngineInfo]) -> None:
        self._home = activities.home
        self._loaders = [activities.loader(engine) for engine in engines]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(loader)) for loader in self._loaders]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, loader: EngineLoader) -> None:
        backoff, in_vain = FIRST_BACKOFF_S, 0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            message, serves = await self._lost(loader)
            if message is None:
                # Only what was seen to serve has got over its faults: one that is being loaded has not yet.
                backoff, in_vain = (FIRST_BACKOFF_S, 0) if serves else (backoff, in_vain)
                continue
            name = loader.client.info.name
            log.info("%s lost version %d of %s: loading it again", name, message.version, message.run)
            try:
                why = (await loader.apply(message)).why
                in_vain += bool(why)
            except RatchetError as error:
                why = str(error)
                in_vain += isinstance(error, EngineError)
            except Exception:
                log.exception("%s: the keeper could not load version %d", name, message.version)
                why = "see above"
            if why:
                log.warning("%s: version %d is not served: %s", name, message.version, why)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
            if in_vain == LOADS_IN_VAIN:
                log.warning("%s: %d loads in vain: starting it anew", name, in_vain)
                await loader.restarted(message, f"{in_vain} loads in vain, the last: {why}")
                in_vain = 0
                async with loader.lock:
                    end_server(self._home, name)

    async def _lost(self, loader: EngineLoader) -> tuple[ApplyInput | None, bool]:
        """(what the engine should serve and does not, whether it serves what it should); nothing and False while it
        rests, is being loaded, or does not answer."""
        desired = loader.desired
        if desired is None or desired.resting or loader.lock.locked():
            return None, False
        with suppress(EngineError):
            label = await loader.client.label()
            serves = label == policy_label(desired.message.run, desired.message.version) and not desired.asleep
            # A load may have begun while the engine was asked.
            if not loader.lock.locked():
                return (None if serves else desired.message), serves
        return None, False
