"""A version's weights on an engine's machine, verified, while the engine goes on: as files from the object store, or
from the trainer's machine into the engine's memory, as the manifest says. Called by the loader, before its pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
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
from workflows.errors import StorageError

FETCH, STAGE = "fetch", "stage"
"""Parts of a load: files come to this machine, or weights into the engine's memory."""
STAGED_EVERY_S = 0.02
STAGE_S = 540.0
"""How long weights may take from the trainer's machine."""

Exchange = Callable[[], Coroutine[Any, Any, None]]
"""Exchanges the weights of the paused engine for others that wait for it."""


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
    async def at_hand(self, manifest: Manifest, model: Path, tried: Trying) -> AsyncIterator[Exchange]:
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
                yield partial(self._client.swap, manifest.weights_file.sha256)
                return
        async with self._weights.verified(manifest, model) as (folder, _):
            yield partial(self._client.reload, str(folder))

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
