"""The engines of an evaluation: had for itself, serving the version, and asked what they serve.

Owns how often they were brought back. What they do is activities on the queues of their hosts, and on the
evaluation's own. Called by Evaluation.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.workflow import ActivityHandle

from workflows import policies
from workflows.contracts import (
    ApplyInput,
    ApplyOutput,
    EngineInfo,
    EvaluationInput,
    FailureType,
    FingerprintInput,
    FingerprintOutput,
    LeaseEnginesInput,
    LeaseEnginesOutput,
    QuantizedInput,
    ServeInput,
    ServeOutput,
    engine_queue,
)
from workflows.failures import sentence

FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=5), timedelta(minutes=1)
"""Between questions whether the engines are free."""
MOST_WAIT = timedelta(hours=24)
"""How long a run may have the engines before the evaluation gives up."""
PIN = replace(policies.APPLY, schedule_to_close=timedelta(minutes=10))
SERVE = replace(policies.SERVE, schedule_to_close=timedelta(minutes=30))


class Refused(Exception):
    """Its episodes do not make a result: internal, never crosses the workflow."""


class EvaluationEngines:
    """`input`: of the evaluation, with the engines that it may have."""

    def __init__(self, input: EvaluationInput) -> None:
        self.input = input
        self.pins = 0
        """How often the engines were brought back to the version."""
        self._pinning = asyncio.Lock()

    async def lease(self) -> bool:
        """Have the engines for itself: weights change under a run that goes on. Whether it had to wait."""
        began, pause = workflow.now(), FIRST_WAIT
        while True:
            out = await policies.call(
                "lease_engines",
                LeaseEnginesInput(run=workflow.info().workflow_id),
                LeaseEnginesOutput,
                policies.LINEAGE,
                summary="lease the engines",
            )
            if not out.held_by:
                return pause > FIRST_WAIT
            if workflow.now() - began > MOST_WAIT:
                raise ApplicationError(
                    f"the engines were not free within {MOST_WAIT}: {out.held_by!r} holds them",
                    type=FailureType.ENGINE,
                    non_retryable=True,
                )
            workflow.set_current_details(f"waiting for the engines, which {out.held_by!r} holds")
            await workflow.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)

    async def serve(self) -> None:
        """Engines that do not come up are left out, as long as one does."""
        input = self.input
        workflow.set_current_details(f"{len(input.engines)} engine(s) start on {input.model}")
        serving = [
            policies.start(
                "serve",
                ServeInput(
                    run=input.run,
                    engine=engine,
                    model=input.model,
                    context_length=input.limits.context_length,
                    dtype=input.dtype,
                ),
                ServeOutput,
                SERVE,
                summary=f"{engine.name} serves {input.model}",
                queue=engine_queue(engine.host),
            )
            for engine in input.engines
        ]
        whys = _whys(input.engines, await asyncio.gather(*serving, return_exceptions=True))
        up = [engine for engine, why in zip(input.engines, whys, strict=True) if not why]
        if not up:
            raise ApplicationError(f"no engine serves: {'; '.join(whys)}", type=FailureType.ENGINE, non_retryable=True)
        self.input = input.model_copy(update={"engines": up})

    async def fingerprint(self, when: str) -> FingerprintOutput:
        """What serves. Raises Refused where engines differ, or none carries the version."""
        input = self.input
        message = FingerprintInput(
            run=input.run,
            version=input.version,
            manifest=input.manifest,
            model=input.model,
            tasks=input.tasks,
            limits=input.limits,
            engines=input.engines,
        )
        try:
            out = await policies.call(
                "fingerprint", message, FingerprintOutput, policies.CHECK, summary=f"what serves {when}"
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            raise Refused(f"{when}: {sentence(error)}") from error
        if out.refused:
            raise Refused(out.refused)
        return out

    async def pin(self) -> None:
        """Bring the version to every engine; one that serves it is only asked. Raises Refused where none can."""
        input = self.input
        workflow.set_current_details(f"version {input.version} goes to {len(input.engines)} engine(s)")
        loads = [self._load(engine) for engine in input.engines]
        whys = _whys(input.engines, await asyncio.gather(*loads, return_exceptions=True))
        if all(whys):
            raise Refused(f"no engine serves version {input.version}: {'; '.join(whys)}")

    def _load(self, engine: EngineInfo) -> ActivityHandle[ApplyOutput]:
        input, queue = self.input, engine_queue(engine.host)
        where: dict[str, Any] = {
            "run": input.run,
            "engine": engine,
            "version": input.version,
            "manifest": input.manifest,
        }
        if not input.quantization:
            load, summary = ApplyInput(**where, kv=input.limits.kv), f"version {input.version} on {engine.name}"
            return policies.start("apply", load, ApplyOutput, PIN, summary=summary, queue=queue)
        message = QuantizedInput(
            **where,
            model=input.model,
            context_length=input.limits.context_length,
            dtype=input.dtype,
            method=input.quantization,
        )
        summary = f"version {input.version} in {input.quantization} on {engine.name}"
        return policies.start("serve_quantized", message, ApplyOutput, SERVE, summary=summary, queue=queue)

    async def pin_again(self, seen: int) -> None:
        """`pin`, once for all that noticed the same change. `seen`: `pins` when the attempt began."""
        async with self._pinning:
            if self.pins == seen:
                await self.pin()
                # Afterwards: what begins before the engines are back has seen the same change.
                self.pins += 1


def _whys(engines: list[EngineInfo], ended: list[Any]) -> list[str]:
    """Why each engine did not do what it was asked to; empty where it did. Raises a cancellation, and our own bugs."""
    whys = []
    for engine, end in zip(engines, ended, strict=True):
        if isinstance(end, BaseException):
            if not isinstance(end, ActivityError) or is_cancelled_exception(end):
                raise end
            whys.append(f"{engine.name}: {sentence(end)}")
        elif isinstance(end, ApplyOutput) and not end.proven:
            whys.append(f"{engine.name}: {end.why}")
        else:
            whys.append("")
    return whys


def require_unchanged(before: FingerprintOutput, after: FingerprintOutput) -> None:
    """Raises Refused with what changed."""
    names = sorted(before.fields.keys() | after.fields.keys())
    changed = [name for name in names if before.fields.get(name) != after.fields.get(name)]
    if changed:
        what = ", ".join(f"{name} {before.fields.get(name)} -> {after.fields.get(name)}" for name in changed)
        raise Refused(f"what serves changed while it was evaluated: {what}")
    for engine, parameters in after.engines.items():
        if before.engines.get(engine, parameters) != parameters:
            raise Refused(f"{engine} holds other parameters than before the first episode")
