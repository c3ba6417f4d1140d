"""From a batch to weights in the engines: start the parts, reserve, update, publish, apply, evaluate.

Part of TrainingRun, on its state: each function makes one step durable and leaves the state as it is afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    TerminatedError,
    is_cancelled_exception,
)
from temporalio.workflow import ParentClosePolicy

from workflows import policies
from workflows.admission import end_surplus, pick_tasks
from workflows.attributes import started
from workflows.contracts import (
    ApplyInput,
    ApplyOutput,
    EngineInfo,
    EvaluationInput,
    EvaluationResult,
    FailureType,
    LeaseEnginesInput,
    LeaseEnginesOutput,
    OnStale,
    PublishInput,
    PublishOutput,
    Queue,
    ReserveBatchInput,
    ReserveBatchOutput,
    ScoreInput,
    ScoreOutput,
    ServeInput,
    ServeOutput,
    Split,
    TrainerInput,
    TrainerOutput,
    UpdateInput,
    UpdateOutput,
    engine_queue,
)
from workflows.failures import sentence
from workflows.run_state import MAX_EMPTY_BATCHES, Carry

APPLY_ROUNDS = 5
LEASE_EVERY = timedelta(seconds=5)
LATE = timedelta(seconds=5)
"""Least time that an engine has for a version after another has proven it."""
LATE_AGAIN = timedelta(milliseconds=500)

Say = Callable[[str], None]


def _config_json(carry: Carry) -> dict[str, Any]:
    return carry.config.model_dump(mode="json")


async def lease_engines(run: str, say: Say) -> None:
    """One run at a time has the engines; another waits and says for whom."""
    while True:
        out = await policies.call(
            "lease_engines",
            LeaseEnginesInput(run=run),
            LeaseEnginesOutput,
            policies.LINEAGE,
            summary="lease the engines",
        )
        if not out.held_by:
            return
        say(f"waiting for the engines, which run {out.held_by!r} holds")
        await workflow.sleep(LEASE_EVERY)


async def start_parts(run: str, carry: Carry, say: Say) -> None:
    """The trainer and the engines come up side by side."""
    config, engines = carry.config, carry.opened.engines
    say(f"starting {len(engines)} engine(s) and the trainer on {config.model}")
    serving = [
        policies.start(
            "serve",
            ServeInput(
                run=run,
                engine=engine,
                model=config.model,
                context_length=config.rollout.context_length,
                dtype=config.training.dtype,
            ),
            ServeOutput,
            policies.SERVE,
            summary=f"{engine.name} serves {config.model}",
            queue=engine_queue(engine.host),
        )
        for engine in engines
    ]
    trainer = await policies.call(
        "start_trainer",
        TrainerInput(run=run, config=_config_json(carry), resume_checkpoint=carry.opened.resume_checkpoint),
        TrainerOutput,
        policies.UPDATE,
        summary=f"load {config.model}",
        queue=Queue.TRAINING,
    )
    await asyncio.gather(*serving)
    carry.checkpoint = trainer.checkpoint


async def hold_out_divergent(run: str, carry: Carry, weighed: dict[int, int], say: Say) -> None:
    """Before a batch is cut: groups whose policy is further from today's than training.max_divergence leave the pool,
    so that others take their place. Age is only a guard; tokens of today's weights are not measured.

    `weighed`: by group, the version against which it was measured last."""
    config, version, rules = carry.config, carry.policy_version, carry.rules
    if config.training.on_stale is not OnStale.DROP:
        return
    while numbers := [
        group.number
        for group in carry.pool.next_batch(rules)
        if weighed.get(group.number) != version
        and (group.replayed or (group.min_version is not None and group.min_version < version))
    ]:
        say(f"weighing {len(numbers)} groups of earlier versions")
        out = await policies.call(
            "score",
            ScoreInput(run=run, config=_config_json(carry), checkpoint=carry.checkpoint, groups=numbers),
            ScoreOutput,
            policies.UPDATE,
            summary=f"divergence of {len(numbers)} groups from version {version}",
            queue=Queue.TRAINING,
        )
        weighed.update(dict.fromkeys(numbers, version))
        limit = config.training.max_divergence
        carry.pool.drop(
            "beyond_divergence", [n for n, value in zip(numbers, out.divergences, strict=True) if value > limit]
        )
    carry.pool.mark(rules, workflow.now().timestamp())


async def update(run: str, carry: Carry, say: Say) -> bool:
    """Cut the batch, reserve its rows, make the step. False when the batch taught nothing: it is used up, no step is
    made, and the run collects again. Raises ApplicationError after too many of those in a row."""
    now, rules = workflow.now().timestamp(), carry.rules
    opened_at, complete_at = carry.batch_opened_at or now, carry.pool.complete_at or now
    batch = carry.pool.cut(rules)
    carry.pool.mark(rules, now)
    next_opened_at = now if carry.pool.collects(rules) else 0.0
    await end_surplus(run, carry.pool.surplus)
    carry.short_share = mean([float(group.short) for group in batch])
    step = carry.step + 1
    reserved = await policies.call(
        "reserve_batch",
        ReserveBatchInput(
            run=run,
            step=step,
            policy_version=carry.policy_version,
            groups=batch,
            opened_at=opened_at,
            complete_at=complete_at,
            dropped=carry.pool.take_untold(),
            tries=carry.void_batches,
        ),
        ReserveBatchOutput,
        policies.LINEAGE,
        summary=f"batch of step {step}: {len(batch)} groups",
    )
    carry.wait = reserved.wait
    say(f"updating: step {step} on {reserved.episodes} episodes")
    out = await policies.call(
        "update",
        UpdateInput(
            run=run,
            config=_config_json(carry),
            batch_id=reserved.batch_id,
            step=step,
            policy_version=carry.policy_version,
        ),
        UpdateOutput,
        policies.UPDATE,
        summary=f"step {step} on {reserved.episodes} episodes",
        queue=Queue.TRAINING,
    )
    carry.pool.left_out(out.dropped)
    if out.void:
        _note_void(carry, out.void)
        return False
    carry.void_batches = 0
    carry.batch_opened_at = next_opened_at
    carry.step, carry.checkpoint = out.step, out.checkpoint
    carry.reward = reserved.reward
    carry.warning = out.warning
    carry.adapt(out.metrics.get("off_policy/divergence"))
    return True


def _note_void(carry: Carry, why: str) -> None:
    """The next batch counts its wait from the last one that trained."""
    carry.void_batches += 1
    carry.trained(workflow.now().timestamp())
    if carry.void_batches == MAX_EMPTY_BATCHES:
        raise ApplicationError(
            f"{MAX_EMPTY_BATCHES} batches in a row taught nothing, the last one because {why}",
            type=FailureType.TRAINER,
            non_retryable=True,
        )


async def publish_and_apply(run: str, carry: Carry, say: Say) -> None:
    """Publish the weights of the present step and bring them to every engine; at least one must prove them.

    An engine that can't, or that takes far longer than another did, is out of routing until it has; the run goes on
    with the others."""
    version = carry.step
    say(f"publishing version {version}")
    published = await policies.call(
        "publish",
        PublishInput(
            run=run, config=_config_json(carry), version=version, step=carry.step, checkpoint=carry.checkpoint
        ),
        PublishOutput,
        policies.PUBLISH,
        summary=f"version {version}",
        queue=Queue.TRAINING,
    )
    carry.manifest = published.manifest
    for round_number in range(APPLY_ROUNDS):
        whys = await _apply_to_all(run, carry, version, say)
        if not all(whys):
            carry.policy_version = version
            return
        say(f"no engine could prove version {version}: {whys[0]}; trying again")
        await workflow.sleep(timedelta(seconds=5 * (round_number + 1)))
    raise ApplicationError(
        f"no engine could prove version {version}: {'; '.join(whys)}", type=FailureType.ENGINE, non_retryable=True
    )


async def _apply_to_all(run: str, carry: Carry, version: int, say: Say) -> list[str]:
    """Why each engine does not serve the version; empty where it does. Once one does, the others have about as long
    again, one that was late the last time a moment: the keeper of their host brings them the version when they
    answer."""
    engines = carry.opened.engines
    tasks = [asyncio.ensure_future(_apply(run, carry, engine, version)) for engine in engines]
    if len(tasks) == 1 or not workflow.patched("engines-in-time"):
        return list(await asyncio.gather(*tasks))
    began, deadline = workflow.now(), None
    waiting: list[asyncio.Task[str]] = list(tasks)
    try:
        while waiting and (deadline is None or workflow.now() < deadline):
            left = None if deadline is None else (deadline - workflow.now()).total_seconds()
            _, waiting = await workflow.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            proven = any(task.done() and not task.exception() and not task.result() for task in tasks)
            if proven and deadline is None:
                slow = [engine.name for engine, task in zip(engines, tasks, strict=True) if task in waiting]
                known = set(slow) <= set(carry.late_engines)
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


async def _apply(run: str, carry: Carry, engine: EngineInfo, version: int) -> str:
    """Why the engine does not serve the version; empty when it does."""
    try:
        out = await policies.call(
            "apply",
            ApplyInput(run=run, engine=engine, version=version, manifest=carry.manifest),
            ApplyOutput,
            policies.APPLY,
            summary=f"version {version} on {engine.name}",
            queue=engine_queue(engine.host),
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        return f"{engine.name}: {sentence(error)}"
    return "" if out.proven else f"{engine.name}: {out.why}"


async def evaluate(run: str, carry: Carry, say: Say) -> None:
    """Held-out tasks under the present version; once per version."""
    evaluation = carry.config.evaluation
    if not evaluation.tasks or carry.evaluated_version == carry.policy_version:
        return
    say(f"evaluating version {carry.policy_version} on {evaluation.tasks} held-out tasks")
    message = EvaluationInput(
        run=run,
        version=carry.policy_version,
        model=carry.config.model,
        tasks=await pick_tasks(carry, Split.HELD_OUT, 0, evaluation.tasks),
        samples_per_task=evaluation.samples_per_task,
        concurrency=carry.config.max_concurrent_episodes,
        limits=carry.config.rollout.limits(),
        seed=carry.config.seed,
    )
    try:
        result = await workflow.execute_child_workflow(
            "Evaluation",
            message,
            id=message.evaluation_id,
            task_queue=Queue.EPISODES,
            task_timeout=policies.TASK_TIMEOUT,
            result_type=EvaluationResult,
            parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
            search_attributes=started(run),
            static_summary=f"held-out tasks under version {carry.policy_version}",
        )
    except ChildWorkflowError as error:
        if workflow.cancellation_reason() is not None or not isinstance(error.cause, CancelledError | TerminatedError):
            raise
        # An operator ended the evaluation alone: the run goes on without it.
        say(f"the evaluation of version {carry.policy_version} was ended by hand")
        carry.evaluated_version = carry.policy_version
        return
    carry.evaluation_last = result.mean_reward
    carry.evaluated_version = carry.policy_version
    if carry.evaluation_first is None:
        carry.evaluation_first = result.mean_reward


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
