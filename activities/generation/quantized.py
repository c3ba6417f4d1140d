"""The `serve_quantized` activity: an engine serves a published version quantized, for an evaluation.

The weights of the version are verified and quantized on the engine's machine, and the server is started on them: it
never had others. It proves the version by the manifest's canary, within what rounding to eight bits may do to it, and
only then carries the label that routing reads. Nothing keeps it there: an engine that restarts carries no label until
it is asked again, and the next `serve` of a run has it serve that run's model. Called by the Evaluation workflow on the
queue `engine@<host>`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path

from temporalio import activity

from activities.generation.engine import EngineClient
from activities.generation.loading import EngineActivities
from activities.generation.server import EngineSpec, routes_experts
from activities.generation.serving import serve
from activities.generation.weights import WeightsCache
from activities.publication.manifest import Manifest, read_manifest
from storage.objects import ObjectStore
from workflows.contracts import ApplyOutput, QuantizedInput, policy_label
from workflows.errors import EngineError, InvalidConfig, StorageError

TOLERANCE = 0.3
"""Largest mean |difference| of the canary's log-probabilities, in nats. Eight bits give some hundredths; the weights
of another model some nats."""
START_S = 600.0
KEEP = 2
"""Quantized versions that stay on the disk."""
QUANTIZE_S = 1800.0


class QuantizedActivities:
    """`engines` are the host's loads: a load and this never meet on one engine."""

    def __init__(self, engines: EngineActivities, store: ObjectStore) -> None:
        self._engines = engines
        self._store = store
        self._weights = WeightsCache(store, engines.home / "quantized" / "sources")

    @activity.defn(name="serve_quantized")
    async def serve_quantized(self, message: QuantizedInput) -> ApplyOutput:
        """Have the engine serve the version, and prove it; done before, it is only asked. Raises EngineError,
        StorageError, or InvalidConfig for a model that can't be quantized."""
        began, loader = time.monotonic(), self._engines.loader(message.engine)
        manifest = await asyncio.to_thread(read_manifest, self._store, message.manifest)
        if manifest.version != message.version or manifest.canary is None:
            raise StorageError(f"{message.manifest}: not version {message.version} with a canary", retryable=False)
        if routes_experts(message.model):
            raise InvalidConfig("serving.quantization: int8 is for models without experts")
        folder = await self._quantized(manifest, Path(message.model))
        spec = EngineSpec.of(str(folder), context_length=message.context_length, dtype=message.dtype)
        async with loader.lock:
            await serve(loader.client, spec, self._engines.home, wait_s=START_S)
            started = time.monotonic()
            why, worst = await self._proves(loader.client, manifest)
            if not why:
                await loader.client.set_label(policy_label(message.run, message.version))
        return ApplyOutput(
            engine=message.engine.name,
            version=message.version,
            proven=not why,
            pause_s=0.0,
            seconds={"start": started - began, "prove": time.monotonic() - started},
            canary_max_abs=worst,
            why=why,
        )

    async def _quantized(self, manifest: Manifest, model: Path) -> Path:
        """The folder of the quantized version, made where it is not there."""
        root = self._engines.home / "quantized"
        folder = root / f"{manifest.digest[:32]}-int8"
        if not (folder / "config.json").is_file():
            async with self._weights.verified(manifest, model) as (source, _):
                await _run(sys.executable, "-m", "activities.generation.quantize", str(source), str(folder))
        others = sorted(root.glob("*-int8"), key=lambda path: path.stat().st_mtime, reverse=True)
        for other in [path for path in others if path != folder][KEEP - 1 :]:
            await asyncio.to_thread(shutil.rmtree, other, ignore_errors=True)
        return folder

    async def _proves(self, client: EngineClient, manifest: Manifest) -> tuple[str, float]:
        """(why the engine has not proven the version, the canary's largest |difference|)."""
        assert manifest.canary is not None
        found = await client.score(manifest.canary.token_ids)
        apart = [abs(mine - theirs) for mine, theirs in zip(found, manifest.canary.logprobs, strict=True)]
        mean = sum(apart) / max(1, len(apart) - 1)
        if not mean <= TOLERANCE:
            why = f"the canary differs from the trainer's by {mean:.2g} nats in the mean; {TOLERANCE} is allowed"
            return why, max(apart)
        return "", max(apart)


async def _run(*argv: str) -> None:
    """Raises EngineError, retryable, with the last words of a process that fails."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), QUANTIZE_S)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        words = " ".join(said.decode(errors="replace").split()[-40:])
        raise EngineError(f"the weights could not be quantized (exit {process.returncode}): {words}")
