"""Training states in the object store: saved content-addressed with the manifest last, loaded whole or refused; between
saved ones, the batches that lead from one to the next.

Called by the update and by whoever needs the trainer at a step, in the trainer's thread.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from activities.publication.manifest import (
    Manifest,
    download_files,
    objects_prefix,
    read_manifest,
    upload_folder,
    write_manifest,
)
from activities.training.engine import TAG, UNIVERSAL, Trainer
from activities.training.ranks import everywhere
from activities.training.transit import transit_folder
from activities.training.work import Work
from storage.objects import ObjectStore
from workflows.errors import TrainerError


def state_bytes(trainer: Trainer) -> int:
    """About what a training state takes: the weights, and float32 weights and two moments of the optimizer."""
    return trainer.parameters * (int(trainer.dtype.itemsize) + 12)


def save_training_state(
    trainer: Trainer, store: ObjectStore, *, run: str, step: int, key: str, spool: Path, work: Work
) -> Manifest:
    """Write the trainer's state as the manifest `key`."""
    with transit_folder(spool, state_bytes(trainer)) as folder:
        saved = everywhere(Trainer.save_state, trainer, folder)
        work.check(f"uploading the state of step {step}")
        files = upload_folder(store, objects_prefix(run), saved, progress=work.moved)
        if missing := trainer.state_files() - {file.name for file in files}:
            raise TrainerError(f"the training state lacks {', '.join(sorted(missing))}")
        manifest = Manifest(
            kind="training_state", run=run, version=step, step=step, world_size=trainer.world_size, files=files
        )
        write_manifest(store, key, manifest)
        return manifest


def load_training_state(
    trainer: Trainer, store: ObjectStore, *, key: str, spool: Path, work: Work, reshape: bool = False
) -> Manifest:
    """Bring a freshly built trainer to the state `key`, or where that was not saved to the one that it is made from.
    Returns the manifest of `key`. Raises TrainerError (final) where the state can't be taken over."""
    asked = manifest = read_manifest(store, key)
    if asked.kind == "redo":
        manifest = read_manifest(store, asked.base)
    if manifest.kind != "training_state":
        raise TrainerError(f"{key} holds {manifest.kind}, not a training state", retryable=False)
    other_size = manifest.world_size != trainer.world_size
    if other_size and not reshape:
        raise TrainerError(
            f"{key} was saved with world size {manifest.world_size}, this trainer has {trainer.world_size}: start it "
            f"with RATCHET_TRAINER_PROCESSES={manifest.world_size}, or a new run with resume_from and "
            f'"training": {{"reshape_checkpoint": true}}, or one from the published weights',
            retryable=False,
        )
    with transit_folder(spool, (3 if other_size else 1) * manifest.total_bytes) as folder:
        work.check(f"downloading the state of step {manifest.step}")
        download_files(store, manifest, folder / TAG, progress=work.moved)
        if other_size:
            work.check(f"reshaping the state of {manifest.world_size} processes for {trainer.world_size}")
            make_universal(trainer, folder)
            everywhere(Trainer.load_universal, trainer, folder)
        else:
            everywhere(Trainer.load_state, trainer, folder)
        return asked


def make_universal(trainer: Trainer, folder: Path) -> None:
    """Turn the state in `folder/state`, of any number of processes, into one that any number can load, beside it.
    Raises TrainerError (final) where DeepSpeed's conversion can't."""
    if trainer.zero_stage not in (1, 2):
        raise TrainerError(
            f"training.reshape_checkpoint works with ZeRO stages 1 and 2, this trainer has {trainer.zero_stage}: start"
            " it with the number of processes that the state was saved with, or a new run from the published weights",
            retryable=False,
        )
    module = "deepspeed.checkpoint.ds_to_universal"
    command = [sys.executable, "-m", module, "--input_folder", str(folder / TAG)]
    command += ["--output_folder", str(folder / UNIVERSAL), "--inject_missing_state"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise TrainerError(f"the state can't be reshaped: {module}: {' '.join(last)}", retryable=False)


def note_state(store: ObjectStore, *, run: str, step: int, key: str, before: str, batch_id: str) -> None:
    """Write the manifest `key` of a state that is not saved: the state `before` and then the update on a batch."""
    last = read_manifest(store, before)
    redo = last.kind == "redo"
    manifest = Manifest(
        kind="redo",
        run=run,
        version=step,
        step=step,
        files=[],
        base=last.base if redo else before,
        batches=[*last.batches, batch_id],
    )
    write_manifest(store, key, manifest)
