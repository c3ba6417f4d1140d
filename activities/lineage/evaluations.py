"""The lineage activities of an evaluation that somebody asked for: what its opening checks, and its end.

Called by the Evaluation workflow; a run's own evaluation needs neither.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine
from sqlmodel import Session
from temporalio import activity

from activities.publication.manifest import Manifest, read_manifest
from storage import evaluations, queries
from storage.database import in_transaction
from storage.objects import MissingObject, ObjectStore
from storage.tables import Publication, ServedEvaluation
from tasksets import Taskset, pick
from workflows.config import RunConfig, model_folder
from workflows.contracts import (
    CloseEvaluationInput,
    EngineInfo,
    EvaluationInput,
    EvaluationState,
    OpenEvaluationInput,
    RolloutLimits,
    Split,
    TaskRef,
)
from workflows.errors import InvalidConfig
from workflows.evaluation_request import EvaluationRequest

Result = TypeVar("Result")
MOST_EPISODES = 4096
"""Each is a child of the evaluation and takes up to nine events; Temporal ends a workflow at 51,200."""
DEFAULT_TASKS = 48
"""At most, where neither the request nor the run's configuration says how many."""


class EvaluationActivities:
    """`models_dir` holds the bootstrapped policies by name; `engines` are those of all hosts; `namespace` names the one
    that evaluations are started in; `sandboxes` is the queue of hosts that have them, empty where the episodes' own
    worker does."""

    def __init__(
        self,
        database: Engine,
        store: ObjectStore,
        *,
        engines: list[EngineInfo],
        models_dir: Path,
        open_taskset: Callable[[str], Taskset],
        namespace: Callable[[], Awaitable[str]] | None = None,
        sandboxes: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._store = store
        self._engines = engines
        self._models_dir = models_dir
        self._open_taskset = open_taskset
        self._ask_namespace = namespace
        self._sandboxes = sandboxes
        self._now = now

    async def _write(self, work: Callable[[Session], Result]) -> Result:
        return await in_transaction(self._database, work)

    @activity.defn(name="open_evaluation")
    async def open_evaluation(self, message: OpenEvaluationInput) -> EvaluationInput:
        """Fill in what the request leaves open, check what the workflow can't see, write the row. Raises InvalidConfig
        with every mistake."""
        request = EvaluationRequest.model_validate(message.request)
        weights = await asyncio.to_thread(self._weights, request)
        namespace = await self._ask_namespace() if self._ask_namespace is not None else ""
        return await self._write(lambda opened: self._open(opened, message, request, weights, namespace))

    def _weights(self, request: EvaluationRequest) -> Manifest | None:
        """Of a request that names them itself. Raises InvalidConfig."""
        if request.manifest is None:
            return None
        return self._manifest(request.manifest, "manifest")

    def _manifest(self, key: str, field: str) -> Manifest:
        try:
            found = read_manifest(self._store, key)
        except MissingObject:
            raise InvalidConfig(
                f"{field}: there is no {key} in the object store: of a run's weights those stay that"
                " publication.keep_last and keep_every keep, and those that were evaluated"
            ) from None
        if found.kind != "weights":
            raise InvalidConfig(f"{field}: {key} is a {found.kind}, not weights")
        if not found.stored:
            raise InvalidConfig(f"{field}: the weights of {key} were handed out directly and are not in the store")
        return found

    def _open(
        self,
        opened: Session,
        message: OpenEvaluationInput,
        request: EvaluationRequest,
        weights: Manifest | None,
        namespace: str,
    ) -> EvaluationInput:
        run = weights.run if weights is not None else str(request.run)
        try:
            row = queries.run_row(opened, run=run)
        except queries.NotFound as error:
            raise InvalidConfig(f"{'manifest' if weights is not None else 'run'}: {error}") from None
        config, mistakes = RunConfig.model_validate(row.config), list[str]()
        version, manifest = self._version(opened, run, request, weights, mistakes)
        taskset = request.taskset or config.taskset
        limits = _limits(config, request).model_copy(update={"sandboxes": self._sandboxes})
        model = self._model(config, limits, mistakes)
        tasks = self._tasks(taskset, request.tasks or config.evaluation.tasks, mistakes)
        samples = request.samples_per_task or config.evaluation.samples_per_task
        if tasks * samples > MOST_EPISODES:
            mistakes.append(
                f"samples_per_task: {tasks} tasks x {samples} are more than the {MOST_EPISODES} episodes that one"
                " workflow's history has room for: take fewer, or several evaluations of other seeds"
            )
        name = _name(message.workflow_id, run, mistakes)
        if not self._engines:
            mistakes.append("engines: none is configured; start the stack with `ratchet up --engines 1`")
        if limits.max_tokens_per_turn >= limits.context_length:
            mistakes.append("sampling.max_tokens_per_turn: must be below the context_length")
        earlier = evaluations.find(opened, name=message.workflow_id)
        if earlier is not None and earlier.execution != message.execution:
            mistakes.append(
                f"workflow id: evaluation {message.workflow_id!r} exists ({earlier.state}); start under another"
                " --workflow-id"
            )
        if mistakes:
            raise InvalidConfig("\n".join(mistakes))
        seed = config.seed if request.seed is None else request.seed
        plan = EvaluationInput(
            run=run,
            version=version,
            model=str(model),
            tasks=self._pick(opened, taskset, seed, tasks),
            samples_per_task=samples,
            concurrency=request.concurrency or config.max_concurrent_episodes,
            limits=limits,
            seed=seed,
            name=name,
            engines=self._engines,
            manifest=manifest,
            dtype=request.serving.dtype or config.training.dtype,
            quantization=request.serving.quantization or "",
        )
        queries.upsert(opened, self._row(plan, taskset, message, namespace))
        return plan

    def _version(
        self, opened: Session, run: str, request: EvaluationRequest, weights: Manifest | None, mistakes: list[str]
    ) -> tuple[int, str]:
        """(version, key of its manifest)."""
        if weights is not None:
            return weights.version, str(request.manifest)
        version = request.version if request.version is not None else evaluations.newest_version(opened, run=run)
        published = opened.get(Publication, (run, version)) if version is not None else None
        if published is None:
            known = ", ".join(map(str, evaluations.published(opened, run=run))) or "none"
            wanted = f"no version {version}" if version is not None else "no version at all"
            mistakes.append(f"version: run {run!r} has published {wanted}; it has {known}")
            return 0, ""
        try:
            self._manifest(published.manifest, "version")
        except InvalidConfig as error:
            mistakes.append(str(error))
        return published.version, published.manifest

    def _model(self, config: RunConfig, limits: RolloutLimits, mistakes: list[str]) -> Path:
        folder = model_folder(config.model, self._models_dir)
        if not (folder / "config.json").is_file():
            mistakes.append(f"run: its model is not at {folder} any more, and engines need its architecture")
            return folder
        longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
        if longest and limits.context_length > longest:
            mistakes.append(f"serving.context_length: {limits.context_length} is above the model's {longest} positions")
        return folder

    def _tasks(self, name: str, wanted: int, mistakes: list[str]) -> int:
        """How many tasks: those `wanted`, or for 0 as many as there are, up to the default."""
        try:
            held_out = len(self._open_taskset(name).ids(Split.HELD_OUT))
        except InvalidConfig as error:
            mistakes.append(f"taskset: {error}")
            return wanted or DEFAULT_TASKS
        count = wanted or min(DEFAULT_TASKS, held_out) or DEFAULT_TASKS
        if count > held_out:
            mistakes.append(f"tasks: {count}, but the taskset has {held_out} held-out tasks")
        return count

    def _pick(self, opened: Session, name: str, seed: int, count: int) -> list[TaskRef]:
        """The first of the order that a run of this seed has, so that its own evaluations have the same tasks."""
        taskset = self._open_taskset(name)
        refs = pick(taskset, Split.HELD_OUT, seed, 0, count)
        for ref in refs:
            task = taskset.load(ref.task_id)
            queries.put_task(opened, ref=ref, kind=task.kind, instruction=task.instruction)
        return refs

    def _row(
        self, plan: EvaluationInput, taskset: str, message: OpenEvaluationInput, namespace: str
    ) -> ServedEvaluation:
        return ServedEvaluation(
            id=plan.evaluation_id,
            run=plan.run,
            version=plan.version,
            workflow=message.workflow_id,
            execution=message.execution,
            temporal_namespace=namespace,
            in_run=False,
            state=EvaluationState.RUNNING,
            request=message.request,
            model=plan.model,
            taskset=taskset,
            tasks=len(plan.tasks),
            samples_per_task=plan.samples_per_task,
            seed=plan.seed,
            manifest=plan.manifest,
            started_at=self._now(),
        )

    @activity.defn(name="close_evaluation")
    async def close_evaluation(self, message: CloseEvaluationInput) -> None:
        """Free the engines; write the end of one that did not come to a result."""
        await self._write(
            lambda opened: evaluations.close_evaluation(
                opened, workflow=message.workflow_id, state=message.state, reason=message.reason
            )
        )


def _limits(config: RunConfig, request: EvaluationRequest) -> RolloutLimits:
    """The run's, with what the request says instead."""
    asked = request.sampling.model_dump(exclude_none=True) | request.serving.model_dump(
        exclude_none=True, include={"context_length"}
    )
    return RolloutLimits.model_validate(config.limits().model_dump() | asked)


def _name(workflow_id: str, run: str, mistakes: list[str]) -> str:
    """Of the evaluation within its run: the workflow's id, without the run's where that comes first."""
    name = workflow_id.removeprefix(f"{run}/")
    if "/" in name:
        mistakes.append(f"workflow id: {workflow_id!r} may have no slash but the one after {run!r}")
    return name
