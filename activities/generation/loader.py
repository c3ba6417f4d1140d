"""Brings one engine to a version: verified weights, a short pause, a proof, and only then the label that routing reads.

Weights come as files from the object store, or from the trainer's machine into the engine's memory, as the manifest
says; before the pause they are on the engine's machine, verified, and where it can made ready for its kernels. The
label goes `<run>:<old>` -> `<run>:<new>?` -> `<run>:<new>`, with `<run>:<old>~` before them while requests in flight
are to finish. A load that fails, or that nobody saw the end of, is disowned: the label becomes nobody's, requests in
flight are aborted, and it stays so for longer than any answer waits for its proof, so that no token made meanwhile can
pass for proven. Each try is a row from its first part on (storage/weight_tries.py), also one that nobody sees the end
of. Called by the `apply` activity and by the keeper, one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Engine

from activities.generation.engine import EngineClient
from activities.generation.proof import Desired, Shown, compared, judge
from activities.generation.server import read_spec
from activities.generation.supply import FETCH, NO_OFFERS, Exchange, OfferSource, Supply
from activities.generation.weights import WeightsCache
from activities.publication.manifest import Manifest, read_manifest
from storage.database import session
from storage.objects import ObjectStore
from storage.queries import upsert
from storage.tables import EngineLoad
from storage.weight_tries import CANCELLED, FAILED, PROVEN, RESTARTED, UNPROVEN, Trying
from workflows.contracts import (
    ApplyInput,
    ApplyOutput,
    InFlight,
    KvPlan,
    parse_policy_label,
    policy_label,
)
from workflows.errors import EngineError, StorageError

__all__ = ["NO_OFFERS", "EngineLoader", "OfferSource"]

DISOWNED = "unproven"
"""A label of no run."""
HOLD_S = 12.0
"""How long a disowned engine stays so; above activities.PROOF_S."""
COME_BACK_S = 180.0
"""How long a load waits for an engine that restarts."""
LOOK_EVERY_S = 0.5
REACH, SWAP, PROVE, RESTART = "reach", "swap", "prove", "restart"
"""Parts of a load beside those of supply.py: the engine answers, takes the weights, proves them; and what follows loads
in vain."""

Result = TypeVar("Result")


class Swapped(NamedTuple):
    drain_s: float
    """How long requests in flight, or the step that they were in, were waited for, which made tokens meanwhile."""
    pause_s: float


class EngineLoader:
    """One engine's loads. `lock` is held by whoever starts, loads or proves the engine."""

    def __init__(
        self,
        client: EngineClient,
        store: ObjectStore,
        weights: WeightsCache,
        database: Engine,
        home: Path,
        offers: OfferSource = NO_OFFERS,
        *,
        hold_s: float = HOLD_S,
        come_back_s: float = COME_BACK_S,
    ) -> None:
        self.client = client
        self.lock = asyncio.Lock()
        self._store = store
        self._supply = Supply(client, weights, offers)
        self._database = database
        self._home = home
        self._hold_s = hold_s
        self._come_back_s = come_back_s

    @property
    def desired(self) -> Desired | None:
        """What the last `apply` asked for, also of an earlier process."""
        return Desired.read(self._home, self.client.info.name)

    async def apply(self, message: ApplyInput) -> ApplyOutput:
        """Load and prove the version, or find that the engine serves it.

        `proven` False is a load that the engine could not prove. Raises EngineError or StorageError where there was
        none: the engine then serves what it served, or nothing.
        """
        # First: the keeper brings this version to an engine that answers when nobody waits for it any more.
        self._ask_for(message)
        async with self.lock:
            # Whoever was before may have asked for another.
            before = self._ask_for(message)
            async with self._tried(message) as tried:
                label = await self._answering(tried)
                if before.asleep:
                    await self._wake()
                if before.proof is not None and label == _label(message):
                    await self._record(message, before.proof)
                    if tried.begun:
                        await _ended(tried, PROVEN)
                    return before.proof
                self._told(message, proof=None)
                out = await self._bring(message, before.last, label, tried)
                if out.why:
                    await _ended(tried, UNPROVEN, out.why)
                return out

    @asynccontextmanager
    async def _tried(self, message: ApplyInput) -> AsyncIterator[Trying]:
        """The row of a try, with the failure that it ends in."""
        tried = Trying(self._database, run=message.run, version=message.version, engine=self.client.info.name)
        try:
            yield tried
        except asyncio.CancelledError:
            if tried.begun:
                await _uninterrupted(_ended(tried, CANCELLED, "nobody waited for it any more"))
            raise
        except Exception as error:
            await _ended(tried, FAILED, str(error) or type(error).__name__)
            raise

    async def restarted(self, message: ApplyInput, why: str) -> None:
        """Note that the engine's server is started anew because of what became of its loads."""
        tried = Trying(self._database, run=message.run, version=message.version, engine=self.client.info.name)
        await asyncio.to_thread(tried.end, RESTARTED, why, part=RESTART)

    async def rest(self) -> None:
        """Have the engine give its device up, until `apply`."""
        async with self.lock:
            if desired := self.desired:
                desired.model_copy(update={"asleep": True, "resting": True}).write(self._home)
            await self.client.rest()

    async def _wake(self) -> None:
        await self.client.wake()
        if desired := self.desired:
            desired.model_copy(update={"asleep": False}).write(self._home)

    def _ask_for(self, message: ApplyInput) -> Desired:
        """What is desired from now on; with the proof of this very message, if there is one."""
        before = self.desired
        proof = before.proof if before and before.message == message else None
        changes = {"message": message, "proof": proof, "resting": False}
        desired = before.model_copy(update=changes) if before else Desired(message=message)
        if desired != before:
            desired.write(self._home)
        return desired

    def _told(self, message: ApplyInput, *, proof: ApplyOutput | None, last: Shown | None = None) -> None:
        """Note what a load of `message` came to, unless another version was asked for meanwhile."""
        desired = self.desired
        if desired is not None and desired.message == message:
            changes: dict[str, object] = {"proof": proof} | ({"last": last} if last else {})
            desired.model_copy(update=changes).write(self._home)
        elif desired is not None and last is not None:
            desired.model_copy(update={"last": last}).write(self._home)

    async def _bring(self, message: ApplyInput, last: Shown | None, label: str, tried: Trying) -> ApplyOutput:
        spec = read_spec(self._home, self.client.info.name)
        if spec is None:
            raise EngineError(f"{self.client.info.name} has not been told what to serve", retryable=False)
        started = time.monotonic()
        tried.at(FETCH)
        manifest = await asyncio.to_thread(read_manifest, self._store, message.manifest)
        if manifest.version != message.version or manifest.canary is None:
            raise StorageError(f"{message.manifest}: not version {message.version} with a canary", retryable=False)
        async with self._supply.at_hand(manifest, Path(spec.model), tried) as (exchange, prepare_s, slice_s):
            at_hand = time.monotonic()
            tried.at(SWAP)
            plan = message
            if not _settled(label):
                await self._disown()
                # An interrupted proof has put the canary into the cache under the salt of this version.
                plan = message.model_copy(update={"kv": KvPlan.DROP})
            drain_s, pause_s = await _uninterrupted(self._swap(plan, label, exchange))
        swapped = time.monotonic()
        tried.at(PROVE)
        shown = await self._show(manifest, message)
        checked, why = compared(manifest.tensors, await self.client.checksums())
        why = why or judge(manifest, shown, last, spec.dtype, message.kv)
        out = ApplyOutput(
            engine=self.client.info.name,
            version=message.version,
            proven=not why,
            pause_s=pause_s,
            slice_s=slice_s,
            seconds={
                "download": at_hand - started - prepare_s,
                "prepare": prepare_s,
                "drain": drain_s,
                "load": swapped - at_hand - drain_s,
                "prove": time.monotonic() - swapped,
            },
            cached_tokens_after=shown.cached_tokens,
            canary_max_abs=shown.max_abs,
            checked=checked,
            why=why,
        )
        if why:
            await self._record(message, out)
            await self._disown()
            return out
        self._told(message, proof=out, last=shown)
        await _uninterrupted(self._serve(message, out, tried))
        return out

    async def _serve(self, message: ApplyInput, out: ApplyOutput, tried: Trying) -> None:
        await self.client.set_label(_label(message))
        await self._record(message, out)
        await _ended(tried, PROVEN)

    async def _swap(self, message: ApplyInput, label: str, exchange: Exchange) -> Swapped:
        """Exchange the weights while the engine makes no token.

        The label is changed while nothing is being made: what comes after it comes from the new weights.
        """
        began = paused = time.monotonic()
        try:
            policy = parse_policy_label(label) if message.in_flight is InFlight.FINISH else None
            # Asked again: an engine that restarted meanwhile carries no label that it could go on with.
            if policy and policy[2] and await self.client.label() == label:
                await self.client.set_label(policy_label(*policy[:2], closing=True))
            await self.client.pause(message.in_flight, message.kv)
            if message.in_flight is not InFlight.ABORT_CONTINUE:
                # Until now the requests in flight, or the step that they were in, made tokens that are kept.
                paused = time.monotonic()
            await self.client.set_label(policy_label(message.run, message.version, proven=False))
            await exchange()
        except EngineError:
            # The weights may be anything now: nothing in flight is worth keeping, and nothing may be frozen for ever.
            await self._disown(hold_s=0)
            raise
        finally:
            with suppress(EngineError):
                await self.client.resume()
        return Swapped(drain_s=paused - began, pause_s=time.monotonic() - paused)

    async def _show(self, manifest: Manifest, message: ApplyInput) -> Shown:
        assert manifest.canary is not None
        ids = manifest.canary.token_ids
        # Asked before the scoring: the canary was in the cache under the version before, so that a cache that survived
        # the load shows here.
        salt = _label(message) if message.kv is KvPlan.SALT else None
        cached = await self.client.cached_tokens(ids, cache_salt=salt)
        return Shown(
            digest=manifest.digest,
            weights=manifest.weights_file.sha256,
            parameters=await self.client.digest(),
            canary=manifest.canary,
            logprobs=await self.client.score(ids),
            cached_tokens=cached,
        )

    async def _disown(self, *, hold_s: float | None = None) -> None:
        with suppress(EngineError):
            await self.client.set_label(DISOWNED)
            await self.client.abort_all()
        await asyncio.sleep(self._hold_s if hold_s is None else hold_s)

    async def _answering(self, tried: Trying) -> str:
        """The engine's label, as soon as it answers. Raises EngineError when it does not come back."""
        deadline = time.monotonic() + self._come_back_s
        while True:
            try:
                return await self.client.label()
            except EngineError:
                if time.monotonic() > deadline:
                    raise
            if not tried.begun:
                tried.at(REACH)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _record(self, message: ApplyInput, out: ApplyOutput) -> None:
        row = EngineLoad(
            run=message.run,
            version=message.version,
            engine=out.engine,
            proven=out.proven,
            why=out.why,
            pause_s=out.pause_s,
            seconds=out.seconds,
            cached_tokens_after=out.cached_tokens_after,
            canary_max_abs=out.canary_max_abs,
            checked=out.checked,
            loaded_at=time.time(),
        )
        await asyncio.to_thread(self._write, row)

    def _write(self, row: EngineLoad) -> None:
        with session(self._database) as opened:
            upsert(opened, row)


async def _ended(tried: Trying, ended: str, why: str = "") -> None:
    await asyncio.to_thread(tried.end, ended, why, part=REACH)


def _label(message: ApplyInput) -> str:
    return policy_label(message.run, message.version)


def _settled(label: str) -> bool:
    """Whether nobody waits for a proof of what the engine serves: a `?` was left by a load that nobody ended."""
    policy = parse_policy_label(label)
    return policy is None or policy[2]


async def _uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Await to the end also when cancelled, and be cancelled then: half of it would leave the engine paused."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
