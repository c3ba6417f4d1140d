"""The one trainer of this process and the one thread in which it lives. Owns which state the trainer holds.

Promises: work is done one piece after the other; a trainer is handed out only when it holds exactly the committed
state that was asked for, from memory where it does, otherwise from the object store and the batches recorded since;
half a step is never built upon. Called by the training and publication activities.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from temporalio import activity

from activities.publication.manifest import read_manifest
from activities.training.checkpoints import load_training_state
from activities.training.engine import Trainer
from activities.training.ranks import everywhere
from activities.training.transit import sweep_transit
from activities.training.work import Work
from storage.objects import ObjectStore
from workflows.config import RunConfig
from workflows.errors import TrainerError

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class TrainerService:
    """Built once per process; `spool` is a local folder for states in transit."""

    def __init__(self, store: ObjectStore, spool: Path) -> None:
        self._store = store
        self._spool = spool
        sweep_transit(spool)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._trainer: Trainer | None = None
        self._built_for = ""
        self._holds = ""
        """Manifest key of the committed state that the trainer holds; empty while it holds none."""
        self._redone: list[str] = []
        """A saved state and the batches after it that the trainer has made again on the way to another state."""
        self.redo: Callable[[Trainer, str, RunConfig, Work], None] = _nobody_redoes
        """Makes the update on a committed batch again. Set by TrainingActivities, which reads batches."""

    async def call(self, function: Callable[[Work], Result]) -> Result:
        """Run `function` in the trainer's thread. When the activity is cancelled the work is told to stop."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()

        def say(progress: str) -> None:
            if activity.in_activity():
                loop.call_soon_threadsafe(context.run, activity.heartbeat, {"progress": progress})

        work = Work(say=say)

        def run() -> Result:
            work.check()
            return function(work)

        try:
            return await loop.run_in_executor(self._thread, context.copy().run, run)
        except asyncio.CancelledError:
            work.stop.set()
            raise

    def fresh(self, config: RunConfig) -> Trainer:
        """A newly built trainer with the model's own weights. In the trainer's thread."""
        self._drop()
        trainer = everywhere(Trainer.build, Path(config.model), config.training, config.seed)
        self._trainer, self._built_for = trainer, _identity(config)
        return trainer

    def at(self, checkpoint: str, config: RunConfig, work: Work) -> Trainer:
        """The trainer, holding exactly the committed state `checkpoint`. In the trainer's thread."""
        trainer = self._trainer if self._built_for == _identity(config) else None
        if trainer is not None and self._holds == checkpoint:
            return trainer
        work.check(f"loading {checkpoint}")
        manifest, done = read_manifest(self._store, checkpoint), len(self._redone)
        if trainer is None or not done or [manifest.base, *manifest.batches][:done] != self._redone:
            trainer, reshape = self.fresh(config), config.training.reshape_checkpoint
            load_training_state(trainer, self._store, key=checkpoint, spool=self._spool, work=work, reshape=reshape)
            self._redone = [manifest.base]
        # A try that ends in between leaves what it has made again to the next one.
        for batch_id in manifest.batches[len(self._redone) - 1 :]:
            work.check(f"making the update on {batch_id} again")
            before, self._redone = self._redone, []
            # Told to stop in the middle of it, the trainer would have to begin again.
            self.redo(trainer, batch_id, config, work.whole())
            self._redone = [*before, batch_id]
        self._holds, self._redone = checkpoint, []
        return trainer

    def leaves_state(self) -> None:
        """The trainer is about to change: what it holds is no committed state until `holds` says so."""
        self._holds, self._redone = "", []

    def holds(self, checkpoint: str) -> None:
        """The trainer's present state is committed as `checkpoint`."""
        self._holds = checkpoint

    def close(self) -> None:
        """Let go of the trainer and its thread, after the work in progress."""
        self._thread.submit(self._drop).result()
        self._thread.shutdown()

    def _drop(self) -> None:
        self._holds, self._built_for, self._redone = "", "", []
        if self._trainer is not None:
            everywhere(Trainer.close, self._trainer)
            self._trainer = None
            gc.collect()


def _nobody_redoes(trainer: Trainer, batch_id: str, config: RunConfig, work: Work) -> None:
    raise TrainerError(f"nobody in this process can make the update on {batch_id} again")


def _identity(config: RunConfig) -> str:
    """What a built engine depends on."""
    return config.model_dump_json(include={"model", "seed", "training"})
