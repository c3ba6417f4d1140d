"""From a batch to weights in the engines: start the parts, reserve, update, publish, apply, evaluate.

Part of TrainingRun, on its state: each function makes one step durable and leaves the state as it is afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.workflow import ParentClosePolicy

from workflows import policies
from workflows.admission import pick_tasks
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
    PublishInput,
    PublishOutput,
    Queue,
    ReserveBatchInput,
    ReserveBatchOutput,
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
from workflows.run_state import Carry

APPLY_ROUNDS = 5
LEASE_EVERY = timedelta(seconds=5)

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


async def update(run: str, carry: Carry, say: Say) -> None:
    """Cut the batch, reserve its rows, make the step."""
    now = workflow.now().timestamp()
    batch = carry.pool.cut(carry.rules)
    carry.collected_s = now - carry.batch_opened_at
    waited = {
        "to_trainable_batch": carry.collected_s,
        "wait_for_siblings": mean([group.closed_at - group.first_sibling_at for group in batch]),
        "wait_for_batch": mean([now - group.closed_at for group in batch]),
    }
    carry.batch_opened_at = now
    step = carry.step + 1
    reserved = await policies.call(
        "reserve_batch",
        ReserveBatchInput(run=run, step=step, policy_version=carry.policy_version, groups=batch, waited=waited),
        ReserveBatchOutput,
        policies.LINEAGE,
        summary=f"batch of step {step}: {len(batch)} groups",
    )
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
    carry.step, carry.checkpoint = out.step, out.checkpoint
    carry.reward = mean([reward for group in batch for reward in group.rewards])


async def publish_and_apply(run: str, carry: Carry, say: Say) -> None:
    """Publish the weights of the present step and bring them to every engine; at least one must prove them.

    An engine that can't is out of routing until it can; the run goes on with the others."""
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
        whys = await asyncio.gather(*(_apply(run, carry, engine, version) for engine in carry.opened.engines))
        if not all(whys):
            carry.policy_version = version
            return
        say(f"no engine could prove version {version}: {whys[0]}; trying again")
        await workflow.sleep(timedelta(seconds=5 * (round_number + 1)))
    raise ApplicationError(
        f"no engine could prove version {version}: {'; '.join(whys)}", type=FailureType.ENGINE, non_retryable=True
    )


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
    result = await workflow.execute_child_workflow(
        "Evaluation",
        message,
        id=message.evaluation_id,
        task_queue=Queue.EPISODES,
        result_type=EvaluationResult,
        parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
        search_attributes=started(run),
        static_summary=f"held-out tasks under version {carry.policy_version}",
    )
    carry.evaluation_last = result.mean_reward
    carry.evaluated_version = carry.policy_version
    if carry.evaluation_first is None:
        carry.evaluation_first = result.mean_reward


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
