"""The activities on a run's own row: its opening with all that is checked for it, its engines, its progress, its end.

Part of LineageActivities. A row that another namespace's run has is left alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import Session
from temporalio import activity

from activities.lineage.tasks import TaskActivities
from activities.publication.manifest import read_manifest
from storage import evaluations, finish_order, queries
from storage.objects import MissingObject, ObjectStore
from storage.tables import Run
from tasksets import Taskset
from workflows.config import RunConfig, model_folder
from workflows.contracts import (
    EXTERNAL_HARNESS,
    CloseRunInput,
    EngineInfo,
    EvaluationState,
    LeaseEnginesInput,
    LeaseEnginesOutput,
    OpenRunInput,
    OpenRunOutput,
    RunProgress,
    RunState,
    Split,
)
from workflows.errors import InvalidConfig

GONE = "its workflow ended without closing the run, as a terminated one does"


class RunActivities(TaskActivities):
    """`models_dir` holds the bootstrapped policies by name; `engines` are those of all hosts; `lives` says whether a
    run's workflow still runs, without which a run that an operator terminated keeps the engines; `namespace` names the
    one that `lives` asks and runs are started in: rows of another namespace are left to that one; `sandbox_hosts` are
    those that the sandboxes of its runs live on, where they have hosts of their own."""

    def __init__(
        self,
        database: Engine,
        store: ObjectStore,
        *,
        engines: list[EngineInfo],
        models_dir: Path,
        open_taskset: Callable[[str], Taskset],
        lives: Callable[[str], Awaitable[bool]] | None = None,
        namespace: Callable[[], Awaitable[str]] | None = None,
        sandbox_hosts: list[str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._sandbox_hosts = sandbox_hosts or []
        super().__init__(database, open_taskset, now)
        self._store = store
        self._engines = engines
        self._models_dir = models_dir
        self._lives = lives
        self._ask_namespace = namespace

    async def _namespace(self) -> str:
        return await self._ask_namespace() if self._ask_namespace is not None else ""

    @activity.defn(name="open_run")
    async def open_run(self, message: OpenRunInput) -> OpenRunOutput:
        """Check what the workflow can't see and write the run's row. Raises InvalidConfig with every mistake."""
        namespace = await self._namespace()
        source = message.config.get("resume_from")
        if isinstance(source, str) and await self._is_gone(source):
            await self.close_gone(source)
        output = await self._write(lambda opened: self._open(opened, message, namespace))
        saved = await asyncio.to_thread(self._saved, output.resume_checkpoint)
        return output.model_copy(update={"resume_checkpoint": saved})

    async def _is_gone(self, run: str) -> bool:
        """Whether the run's row is open although its workflow, of this namespace, runs no more."""
        if self._lives is None or await self._foreign(run):
            return False

        def is_open(opened: Session) -> bool:
            row = opened.get(Run, run)
            return row is not None and row.state not in queries.OVER

        return await self._write(is_open) and not await self._lives(run)

    def _saved(self, checkpoint: str) -> str:
        """The checkpoint, or where its state was not saved the one that it is made from."""
        if not checkpoint:
            return ""
        try:
            return read_manifest(self._store, checkpoint).base or checkpoint
        except MissingObject:
            # The trainer says so, with its name.
            return checkpoint

    def _open(self, opened: Session, message: OpenRunInput, namespace: str) -> OpenRunOutput:
        config = RunConfig.model_validate(message.config)
        mistakes: list[str] = []
        model = self._model(config, mistakes)
        train, held_out = self._tasks(config, mistakes)
        if config.rollout.harness == EXTERNAL_HARNESS and self._sandbox_hosts:
            mistakes.append(
                "rollout.harness: external needs sandboxes on the rollout worker's own machine, and"
                f" RATCHET_SANDBOX_HOSTS names {', '.join(self._sandbox_hosts)}; take shell or tools"
            )
        checkpoint = self._resume(opened, config, mistakes)
        if not self._engines:
            mistakes.append("engines: none is configured; start the stack with `ratchet up --engines 1`")
        earlier = opened.get(Run, message.run)
        if earlier is not None and earlier.execution != message.execution:
            mistakes.append(
                f"workflow id: run {message.run!r} exists ({earlier.state}); start under another --workflow-id,"
                f' with "resume_from": {json.dumps(message.run)} to go on from its last checkpoint'
            )
        if mistakes:
            raise InvalidConfig("\n".join(mistakes))
        if earlier is None:
            opened.add(
                Run(
                    id=message.run,
                    state=RunState.STARTING,
                    config=message.config,
                    mode=config.mode,
                    seed=config.seed,
                    execution=message.execution,
                    temporal_namespace=namespace,
                    resume_from=config.resume_from,
                    train_tasks=train,
                    started_at=self._now(),
                )
            )
        return OpenRunOutput(
            model=str(model),
            train_tasks=train,
            held_out_tasks=held_out,
            engines=self._engines,
            resume_checkpoint=checkpoint,
            sandbox_hosts=self._sandbox_hosts,
        )

    def _model(self, config: RunConfig, mistakes: list[str]) -> Path:
        folder = model_folder(config.model, self._models_dir)
        if not (folder / "config.json").is_file():
            made = sorted(path.parent.name for path in self._models_dir.glob("*/config.json"))
            mistakes.append(
                f"model: no Hugging Face folder at {folder}; `ratchet bootstrap tiny` makes the policy `tiny`, a path"
                f" names any other folder; made here so far: {', '.join(made) or 'none'}"
            )
            return folder
        wanted = {"tokenizer": "tokenizer*.json", "safetensors weights": "*.safetensors"}
        mistakes += [f"model: {folder} has no {what}" for what, glob in wanted.items() if not any(folder.glob(glob))]
        longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
        if longest and config.rollout.context_length > longest:
            mistakes.append(
                f"rollout.context_length: {config.rollout.context_length} is above the model's {longest} positions"
            )
        return folder

    def _tasks(self, config: RunConfig, mistakes: list[str]) -> tuple[int, int]:
        try:
            taskset = self._open_taskset(config.taskset)
        except InvalidConfig as error:
            mistakes.append(f"taskset: {error}")
            return 0, 0
        train, held_out = len(taskset.ids(Split.TRAIN)), len(taskset.ids(Split.HELD_OUT))
        if not train:
            mistakes.append(f"taskset: {config.taskset} has no train tasks")
        if config.evaluation.tasks > held_out:
            mistakes.append(
                f"evaluation.tasks: {config.evaluation.tasks}, but the taskset has {held_out} held-out tasks"
            )
        return train, held_out

    def _resume(self, opened: Session, config: RunConfig, mistakes: list[str]) -> str:
        if config.resume_from is None:
            return ""
        try:
            row = queries.run_row(opened, run=config.resume_from)
        except queries.NotFound as error:
            mistakes.append(f"resume_from: {error}")
            return ""
        if row.state not in queries.OVER:
            mistakes.append(
                f"resume_from: run {config.resume_from!r} is not over ({row.state}) and removes its old states as it"
                " goes: wait for its end, or cancel it"
            )
        checkpoint = queries.last_checkpoint(opened, run=config.resume_from)
        if not checkpoint:
            mistakes.append(f"resume_from: run {config.resume_from!r} has no checkpoint")
        return checkpoint

    @activity.defn(name="lease_engines")
    async def lease_engines(self, message: LeaseEnginesInput) -> LeaseEnginesOutput:
        """Lease the engines where they are free; a holder of this namespace whose workflow is gone, as one that an
        operator terminated, could not free them and is closed here."""
        held_by = await self._write(lambda opened: queries.lease_engines(opened, run=message.run))
        if held_by and self._lives is not None and not await self._foreign(held_by) and not await self._lives(held_by):
            await self.close_gone(held_by)
            held_by = await self._write(lambda opened: queries.lease_engines(opened, run=message.run))
        return LeaseEnginesOutput(held_by=held_by)

    async def _foreign(self, run: str) -> bool:
        namespace = await self._namespace()
        return await self._write(lambda opened: queries.is_foreign(opened, run=run, namespace=namespace))

    @activity.defn(name="record_progress")
    async def record_progress(self, message: RunProgress) -> None:
        def work(opened: Session) -> None:
            row = queries.run_row(opened, run=message.run)
            row.state, row.reason = message.state, message.reason
            row.step, row.policy_version = message.step, message.policy_version
            opened.add(row)

        await self._write(work)

    @activity.defn(name="close_run")
    async def close_run(self, message: CloseRunInput) -> None:
        """Write the run's end, free the engines, abort its unfinished uploads. A run that never opened has no row, or
        another namespace's under its id, which was why: nothing of that is touched."""
        if await self._foreign(message.run):
            return
        await self._close(message)
        await asyncio.to_thread(self._store.abort_uploads, f"runs/{message.run}/")

    async def close_gone(self, run: str) -> None:
        """Close the row of a run, or of an evaluation, whose workflow is gone; one that is closed stays as it is."""
        await self._close(CloseRunInput(run=run, state=RunState.FAILED, reason=GONE))
        failed = EvaluationState.FAILED
        await self._write(lambda opened: evaluations.close_evaluation(opened, workflow=run, state=failed, reason=GONE))

    async def _close(self, message: CloseRunInput) -> None:
        def work(opened: Session) -> None:
            queries.release_engines(opened, run=message.run)
            finish_order.settle(opened, run=message.run)
            row = opened.get(Run, message.run)
            if row is not None and row.state not in queries.OVER:
                row.state, row.reason, row.ended_at = message.state, message.reason, self._now()
                if message.step is not None:
                    row.step = message.step
                if message.policy_version is not None:
                    row.policy_version = message.policy_version
                opened.add(row)

        await self._write(work)
