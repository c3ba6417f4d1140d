"""From a state of the trainer to engines that serve it: publish, apply to all, and the rest of those that take turns.

Part of TrainingRun, on its state, as policy_update.py, which calls it.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from workflows import policies
from workflows.config import RunConfig
from workflows.contracts import (
    ApplyInput,
    ApplyOutput,
    EngineInfo,
    FailureType,
    InFlight,
    PublishInput,
    PublishOutput,
    Queue,
    RestInput,
    Timing,
    WeightChannel,
    engine_queue,
)
from workflows.failures import sentence
from workflows.run_state import Carry, Say

APPLY_ROUNDS = 5
LATE = timedelta(seconds=5)
"""Least time that an engine has for a version after another has proven it."""
LATE_AGAIN = timedelta(milliseconds=500)
FIRST_TURN = timedelta(seconds=60)
"""Of engines that load in turns: the least that the first have, before anything is known of how long it takes."""
PUBLICATIONS = 3
"""Or so many times what publishing took, which moved as many bytes: large weights need longer than that least."""


async def publish_and_apply(run: str, carry: Carry, say: Say) -> None:
    """Publish the weights of the present step and bring them to every engine; at least one must prove them.

    An engine that can't, or that takes far longer than another did, is out of routing until it has; the run goes on
    with the others."""
    version = carry.step
    for round_number in range(APPLY_ROUNDS):
        # What the trainer's machine offers may have gone with it, and an object may be damaged in the store: publishing
        # again makes up for either.
        if (
            round_number == 0
            or carry.config.weight_channel is not WeightChannel.S3
            or workflow.patched("published-again")
        ):
            await _publish(run, carry, version, say, again=round_number > 0)
        whys = await apply_to_all(run, carry, version, say)
        if not all(whys):
            carry.policy_version = version
            return
        say(f"no engine could prove version {version}: {whys[0]}; trying again")
        await workflow.sleep(timedelta(seconds=5 * (round_number + 1)))
    raise ApplicationError(
        f"no engine could prove version {version}: {'; '.join(whys)}", type=FailureType.ENGINE, non_retryable=True
    )


async def _publish(run: str, carry: Carry, version: int, say: Say, *, again: bool) -> None:
    say(f"publishing version {version}")
    began = workflow.now()
    published = await policies.call(
        "publish",
        PublishInput(
            run=run,
            config=carry.config_json(),
            version=version,
            step=carry.step,
            checkpoint=carry.checkpoint,
            again=again,
        ),
        PublishOutput,
        policies.PUBLISH,
        summary=f"version {version}",
        queue=Queue.TRAINING,
    )
    carry.manifest, carry.publish_s = published.manifest, (workflow.now() - began).total_seconds()


async def apply_to_all(run: str, carry: Carry, version: int, say: Say) -> list[str]:
    """Why each engine does not serve the version; empty where it does. With `publication.rolling`, in turns that leave
    at least half of the engines alone."""
    engines = carry.opened.engines
    if not carry.config.publication.rolling or len(engines) == 1:
        return await _apply_to(run, carry, engines, version, carry.late_engines, say)
    known_late, carry.late_engines = carry.late_engines, []
    # Those that were late come last: the others do not wait for them.
    engines = sorted(engines, key=lambda engine: engine.name in known_late)
    # The end of what is in flight belongs to a load that waits for it.
    drain = timedelta(seconds=carry.config.rollout.generate_timeout_s if _waits(carry.config) else 0)
    first_turn = FIRST_TURN
    if workflow.patched("first-turn-by-publication"):
        first_turn = max(first_turn, timedelta(seconds=PUBLICATIONS * carry.publish_s))
    at_once, limit, found = len(engines) // 2, first_turn + drain, dict[str, str]()
    for first in range(0, len(engines), at_once):
        turn, began = engines[first : first + at_once], workflow.now()
        late_before = list(carry.late_engines)
        whys = await _apply_to(run, carry, turn, version, known_late, say, limit=limit)
        carry.late_engines = late_before + carry.late_engines
        found |= {engine.name: why for engine, why in zip(turn, whys, strict=True)}
        if not all(whys):
            limit = max(LATE, 2 * (workflow.now() - began)) + drain
    return [found[engine.name] for engine in carry.opened.engines]


async def _apply_to(
    run: str,
    carry: Carry,
    engines: list[EngineInfo],
    version: int,
    known_late: list[str],
    say: Say,
    *,
    limit: timedelta | None = None,
) -> list[str]:
    """`apply_to_all` for some, at once, within `limit`. Once one serves it, the others have about as long again, one
    that was late the last time a moment: the keeper of their host brings them the version when they answer."""
    tasks = [asyncio.ensure_future(_apply(run, carry, engine, version)) for engine in engines]
    if limit is None and (len(tasks) == 1 or not workflow.patched("engines-in-time")):
        return list(await asyncio.gather(*tasks))
    began = workflow.now()
    deadline = began + limit if limit is not None else None
    in_time = False
    waiting: list[asyncio.Task[str]] = list(tasks)
    try:
        while waiting and (deadline is None or workflow.now() < deadline):
            left = None if deadline is None else (deadline - workflow.now()).total_seconds()
            _, waiting = await workflow.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            proven = any(task.done() and not task.exception() and not task.result() for task in tasks)
            if proven and not in_time:
                in_time = True
                slow = [engine.name for engine, task in zip(engines, tasks, strict=True) if task in waiting]
                known = set(slow) <= set(known_late)
                deadline = workflow.now() + (LATE_AGAIN if known else max(LATE, 2 * (workflow.now() - began)))
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    for task in waiting:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    late = [engine.name for engine, task in zip(engines, tasks, strict=True) if task in waiting]
    carry.late_engines = late
    if late:
        say(f"version {version} is served, by {', '.join(late)} once they answer")
    return [
        f"{engine.name}: not in time" if engine.name in late else task.result()
        for engine, task in zip(engines, tasks, strict=True)
    ]


def _apply_policy(config: RunConfig) -> policies.Policy:
    """With room for the end of what is in flight where the load waits for it."""
    return policies.APPLY.lasting(config.rollout.generate_timeout_s) if _waits(config) else policies.APPLY


def _waits(config: RunConfig) -> bool:
    return config.publication.in_flight is InFlight.FINISH


async def _apply(run: str, carry: Carry, engine: EngineInfo, version: int) -> str:
    """Why the engine does not serve the version; empty when it does."""
    try:
        out = await policies.call(
            "apply",
            ApplyInput(
                run=run,
                engine=engine,
                version=version,
                manifest=carry.manifest,
                in_flight=carry.config.publication.in_flight,
                kv=carry.config.publication.kv,
            ),
            ApplyOutput,
            _apply_policy(carry.config),
            summary=f"version {version} on {engine.name}",
            queue=engine_queue(engine.host),
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        return f"{engine.name}: {sentence(error)}"
    return "" if out.proven else f"{engine.name}: {out.why}"


async def rest(run: str, carry: Carry, say: Say) -> None:
    """Engines that share the trainer's device give it up; the next `apply` wakes them. One that does not answer holds
    nobody up: it makes nothing."""
    say("the engines rest")
    resting = [
        policies.start(
            "rest",
            RestInput(run=run, engine=engine),
            Timing,
            policies.REST,
            summary=f"{engine.name} rests",
            queue=engine_queue(engine.host),
        )
        for engine in carry.opened.engines
    ]
    for engine, done in zip(carry.opened.engines, await asyncio.gather(*resting, return_exceptions=True), strict=True):
        if isinstance(done, ActivityError) and not is_cancelled_exception(done):
            say(f"{engine.name} does not rest: {sentence(done)}")
        elif isinstance(done, BaseException):
            raise done
