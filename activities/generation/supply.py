"""A version's weights on an engine's machine, verified, while the engine goes on: as files from the object store, or
from the trainer's machine into the engine's memory, as the manifest says. Called by the loader, before its pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from activities.generation.engine import EngineClient
from activities.generation.staging import FILE
from activities.generation.weights import WeightsCache, check_tensors
from activities.publication.manifest import Manifest
from activities.publication.offers import Offers
from storage.weight_tries import Trying
from workflows.contracts import WeightChannel
from workflows.errors import EngineError, StorageError

FETCH, STAGE, PREPARE = "fetch", "stage", "prepare"
"""Parts of a load: files come to this machine, or weights into the engine's memory; they are made ready there."""
STAGED_EVERY_S = 0.02
STAGE_S = 540.0
"""How long weights may take from the trainer's machine."""

Exchange = Callable[[], Coroutine[Any, Any, None]]
"""Exchanges the weights of the paused engine for others that wait for it."""

log = logging.getLogger(__name__)


class AtHand(NamedTuple):
    """Weights that wait for the engine's pause."""

    exchange: Exchange
    prepare_s: float
    """For how long the engine, which went on, made them ready."""
    slice_s: float
    """The longest that it made no token for that."""


class OfferSource(NamedTuple):
    """Where the trainer's machine offers weights: the address of its server, and its folder where this is it."""

    address: str = ""
    folder: Path = Path()


NO_OFFERS = OfferSource()


class Supply:
    """Of one engine."""

    def __init__(self, client: EngineClient, weights: WeightsCache, offers: OfferSource) -> None:
        self._client = client
        self._weights = weights
        self._offers = offers

    @asynccontextmanager
    async def at_hand(self, manifest: Manifest, model: Path, tried: Trying) -> AsyncIterator[AtHand]:
        """The manifest's weights, verified, on this machine. `model` is the folder that the engine was started with.

        Raises what WeightsCache.verified raises, and StorageError (retryable) where the trainer's machine does not hand
        them out and they are not in the object store: the engine is not at fault, and serves what it serves."""
        if manifest.channel is not WeightChannel.S3:
            tried.at(STAGE)
            try:
                await self._stage(manifest, model)
            except StorageError:
                if not manifest.stored:
                    raise
                tried.at(FETCH)
            else:
                digest = manifest.weights_file.sha256
                async with self._prepared(tried, partial(self._client.swap, digest), digest=digest) as at_hand:
                    yield at_hand
                return
        async with (
            self._weights.verified(manifest, model) as (folder, _),
            self._prepared(tried, partial(self._client.reload, str(folder)), path=str(folder)) as at_hand,
        ):
            yield at_hand

    @asynccontextmanager
    async def _prepared(self, tried: Trying, in_place: Exchange, **weights: str) -> AsyncIterator[AtHand]:
        """Made ready before the pause where the engine can; otherwise they are loaded `in_place` in it."""
        began, waits = time.monotonic(), True

        async def exchange() -> None:
            nonlocal waits
            await self._client.exchange(**weights)
            waits = False

        tried.at(PREPARE)
        try:
            why, slice_s = await self._client.prepare(**weights)
            if why:
                log.info("%s: weights are loaded in its pause: %s", self._client.info.name, why)
                waits = False
            yield AtHand(in_place if why else exchange, time.monotonic() - began, slice_s)
        finally:
            if waits:
                with suppress(EngineError):
                    await self._client.forget()

    async def _stage(self, manifest: Manifest, model: Path) -> None:
        check_tensors(manifest.tensors, manifest.tensors, model)
        file, source = manifest.weights_file, self._offers.address
        if manifest.channel is WeightChannel.COLOCATED:
            path = Offers(self._offers.folder).path(file.sha256)
            if not path.is_file():
                raise StorageError(f"{path}: not there; weight_channel colocated needs the trainer on this machine")
            source = f"{FILE}{path}"
        await self._client.stage(
            source, digest=file.sha256, size=file.bytes, bytes_per_s=1e6 * manifest.max_mbytes_per_s
        )
        deadline = time.monotonic() + STAGE_S
        while True:
            ready, why = await self._client.staged(file.sha256)
            if ready:
                return
            if why or time.monotonic() > deadline:
                why = why or f"not there after {STAGE_S:.0f} s"
                raise StorageError(f"{self._client.info.name}: the weights did not arrive from {source}: {why}")
            await asyncio.sleep(STAGED_EVERY_S)
