"""From a batch to a new state: start the parts, reserve, update, evaluate; weight_sync.py brings it to the engines.

Part of TrainingRun, on its state: each function makes one step durable and leaves the state as it is afterwards.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import (
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    TerminatedError,
)
from temporalio.workflow import ParentClosePolicy

from workflows import policies
from workflows.admission import end_surplus, pick_tasks
from workflows.attributes import started
from workflows.contracts import (
    EvaluationInput,
    EvaluationResult,
    FailureType,
    LeaseEnginesInput,
    LeaseEnginesOutput,
    OnStale,
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
    WeightChannel,
    engine_queue,
)
from workflows.run_state import MAX_EMPTY_BATCHES, Carry, Say
from workflows.weight_sync import apply_to_all, rest

LEASE_EVERY = timedelta(seconds=5)


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
        TrainerInput(run=run, config=carry.config_json(), resume_checkpoint=carry.opened.resume_checkpoint),
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
            ScoreInput(run=run, config=carry.config_json(), checkpoint=carry.checkpoint, groups=numbers),
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
    carry.pool.left_out(reserved.dropped)
    if reserved.void:
        _note_void(carry, reserved.void)
        return False
    if carry.config.weight_channel is WeightChannel.COLOCATED:
        await rest(run, carry, say)
    say(f"updating: step {step} on {reserved.episodes} episodes")
    out = await policies.call(
        "update",
        UpdateInput(
            run=run,
            config=carry.config_json(),
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
        if carry.config.weight_channel is WeightChannel.COLOCATED:
            await apply_to_all(run, carry, carry.policy_version, say)
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
        limits=carry.limits,
        seed=carry.config.seed,
        engines=carry.opened.engines,
        manifest=carry.manifest,
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
    if result.refused:
        # The report says so, and how to make another; a run does not end for it.
        say(f"the evaluation of version {carry.policy_version} was refused: {result.refused}")
        carry.evaluated_version = carry.policy_version
        return
    carry.evaluation_last = result.mean_reward
    carry.evaluated_version = carry.policy_version
    if carry.evaluation_first is None:
        carry.evaluation_first = result.mean_reward


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
