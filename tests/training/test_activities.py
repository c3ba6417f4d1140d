"""The trainer's activities against a real store and database."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlmodel import select

from activities.publication.manifest import read_manifest
from activities.training import activities as training_activities
from activities.training import ledger
from activities.training.engine import Trainer
from storage.database import session
from storage.tables import Batch, BatchMember
from tests.training.worlds import World
from workflows.config import TrainingConfig
from workflows.errors import FencedError, StorageError, TrainerError

Worlds = Callable[..., World]


def weights_of(world: World) -> dict[str, torch.Tensor]:
    trainer = world.service._trainer
    assert trainer is not None
    return {name: value.clone() for name, value in trainer.weights().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


async def test_an_update_changes_the_weights_and_commits_its_rows(world: Worlds) -> None:
    run = world(minibatches=2, micro_batch_tokens=64)
    started = await run.start()
    before = weights_of(run)
    run.reserve(1)
    output = await run.update(1)

    assert started.parameters > 50_000 and started.world_size == 1
    assert any(not torch.equal(before[name], value) for name, value in weights_of(run).items())
    assert output.metrics["optimizer_steps"] == 2
    assert output.metrics["grad_norm"] > 0
    assert output.metrics["sampled_tokens"] < output.metrics["tokens"]
    with session(run.database) as opened:
        batch = opened.get(Batch, f"{run.run}/b1")
        members = opened.exec(select(BatchMember)).all()
    assert batch is not None and (batch.state, batch.checkpoint) == ("trained", output.checkpoint)
    assert batch.metrics == output.metrics
    assert all(member.advantage is not None for member in members)
    assert sum(member.advantage or 0 for member in members) == pytest.approx(0, abs=1e-9)
    assert not any((run.folder / "spool/trainer").iterdir())


async def test_a_trained_batch_answers_with_what_was_recorded_and_trains_nothing(world: Worlds) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    first = await run.update(1)
    after = weights_of(run)
    again = await run.update(1)
    assert (again.checkpoint, again.metrics, again.step) == (first.checkpoint, first.metrics, 1)
    assert_equal(weights_of(run), after)


@pytest.mark.parametrize("stage", [0, 2, 3])
async def test_a_resumed_run_is_equal_to_the_bit(world: Worlds, stage: int) -> None:
    """Three updates straight, against one, death, and two."""
    deepspeed = {"zero_optimization": {"stage": stage}}
    straight, broken = world(deepspeed=deepspeed, minibatches=2), world(deepspeed=deepspeed, minibatches=2)
    for run in (straight, broken):
        await run.start()
        for step in (1, 2, 3):
            run.reserve(step)
    expected = [await straight.update(step) for step in (1, 2, 3)]
    got = [await broken.update(1)]
    broken.restarted()
    got += [await broken.update(2), await broken.update(3)]
    for one, other in zip(expected, got, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "entropy"):
            assert one.metrics[name] == other.metrics[name], name
    assert_equal(weights_of(straight), weights_of(broken))


@pytest.mark.parametrize("seam", ["save_training_state", "commit", "half way"])
async def test_a_worker_that_dies_within_an_update_redoes_it_from_the_last_checkpoint(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, seam: str
) -> None:
    whole, killed = world(minibatches=2), world(minibatches=2)
    for run in (whole, killed):
        await run.start()
        run.reserve(1)
    await whole.update(1)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        if seam == "commit":
            patched.setattr(ledger, "commit", die)
        elif seam == "half way":
            patched.setattr("activities.training.engine.Trainer.end_update", die)
        else:
            patched.setattr(training_activities, seam, die)
        with pytest.raises(RuntimeError, match="killed"):
            await killed.update(1)
    output = await killed.update(1)
    assert_equal(weights_of(whole), weights_of(killed))
    with session(killed.database) as opened:
        batch = opened.get(Batch, f"{killed.run}/b1")
    assert batch is not None and batch.fence == 2 and batch.checkpoint == output.checkpoint


async def test_no_half_checkpoint_can_be_read_after_a_death_between_the_parts_of_an_upload(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    put_file, sent = run.store.put_file, []

    def put_one(key: str, *args: object, **kwargs: object) -> None:
        if sent:
            raise StorageError("connection lost")
        sent.append(key)
        put_file(key, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(run.store, "put_file", put_one)
        with pytest.raises(StorageError):
            await run.update(1)
    names = [key for key, _ in run.store.keys(f"runs/{run.run}/state/")]
    assert sent and names == [f"runs/{run.run}/state/s000000/f0000/manifest.json"]
    assert not any((run.folder / "spool/trainer").iterdir())
    output = await run.restarted().update(1)
    assert {file.name for file in read_manifest(run.store, output.checkpoint).files} == {
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    }


async def test_a_try_that_was_overtaken_cannot_commit(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    save = training_activities.save_training_state

    def overtaken(*args: object, **kwargs: object) -> object:
        ledger.take_fence(run.database, f"{run.run}/b1")
        return save(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(training_activities, "save_training_state", overtaken)
        with pytest.raises(FencedError, match="try 1 is outdated, now 2"):
            await run.update(1)
    with session(run.database) as opened:
        batch = opened.get(Batch, f"{run.run}/b1")
        assert batch is not None and (batch.state, batch.checkpoint) == ("reserved", "")
        assert all(member.advantage is None for member in opened.exec(select(BatchMember)))
    assert (await run.update(1)).checkpoint.endswith("f0003/manifest.json")


async def test_a_step_does_not_begin_before_the_one_before_it_is_trained(world: Worlds) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    run.reserve(2)
    with pytest.raises(TrainerError, match="step 1 is not trained"):
        await run.update(2)


async def test_a_new_run_takes_over_weights_moments_and_warm_up_of_another(world: Worlds) -> None:
    old, new = world(warmup_steps=3), world(warmup_steps=3)
    await old.start()
    old.reserve(1)
    first = await old.update(1)
    old.reserve(2)
    expected = await old.update(2)
    await new.start(first.checkpoint)
    new.reserve(1)
    with session(new.database) as opened:
        batch = opened.get(Batch, f"{new.run}/b1")
        assert batch is not None
    assert new.service._trainer is not None and new.service._trainer.updates == 1
    output = await new.update(1)
    assert output.step == 1
    assert output.metrics["learning_rate"] == expected.metrics["learning_rate"] > first.metrics["learning_rate"]


async def test_another_world_size_is_refused_with_both_numbers_and_the_way_out(world: Worlds) -> None:
    run = world()
    started = await run.start()
    manifest = read_manifest(run.store, started.checkpoint)
    two = manifest.model_copy(update={"world_size": 2})
    run.store.put("other/manifest.json", two.model_dump_json().encode())
    with pytest.raises(TrainerError, match=r"world size 2, this trainer has 1: convert.*ds_to_universal.*new run"):
        await run.start("other/manifest.json")


async def test_a_state_without_its_optimizer_is_an_error_and_not_a_warning(world: Worlds) -> None:
    run = world()
    started = await run.start()
    manifest = read_manifest(run.store, started.checkpoint)
    torn = manifest.model_copy(update={"files": [file for file in manifest.files if "optim" not in file.name]})
    run.store.put("torn/manifest.json", torn.model_dump_json().encode())
    with pytest.raises(TrainerError, match="lacks zero_pp_rank_0"):
        await run.start("torn/manifest.json")


async def test_cancelled_work_stops_between_parts_and_the_next_try_is_clean(world: Worlds) -> None:
    whole, run = world(micro_batch_tokens=32), world(micro_batch_tokens=32)
    for item in (whole, run):
        await item.start()
        item.reserve(1)
    await whole.update(1)
    task = asyncio.create_task(run.update(1))
    await asyncio.sleep(0.15)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await run.update(1)
    assert_equal(weights_of(whole), weights_of(run))


async def test_engine_and_trainer_that_compute_different_models_stop_the_run(world: Worlds) -> None:
    run = world(mismatch_limit=1e-6)
    await run.start()
    run.reserve(1)
    with pytest.raises(TrainerError, match=r"mismatch_kl .* is above training\.mismatch_limit") as caught:
        await run.update(1)
    assert not caught.value.retryable


async def test_a_killed_process_leaves_a_run_that_another_finishes_to_the_bit(
    world: Worlds, s3_access: dict[str, str]
) -> None:
    """SIGKILL between the upload of step 2's state and its manifest; this process makes steps 2 and 3."""
    straight, killed = world(minibatches=2), world(minibatches=2)
    await straight.start()
    for run in (straight, killed):
        for step in (1, 2, 3):
            run.reserve(step)
    expected = [await straight.update(step) for step in (1, 2, 3)][1:]
    given = {
        "run": killed.run,
        "policy": str(killed.policy),
        "access": s3_access,
        "database": str(killed.database.url),
        "folder": str(killed.folder),
        "training": killed.training,
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.killed_worker"], input=json.dumps(given), text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert any((killed.folder / "spool/trainer").iterdir())
    killed.restarted()
    assert not any((killed.folder / "spool/trainer").iterdir())
    got = [await killed.update(2), await killed.update(3)]
    assert [item.metrics["loss"] for item in got] == [item.metrics["loss"] for item in expected]
    assert_equal(weights_of(straight), weights_of(killed))


def test_a_model_whose_files_name_tensors_otherwise_is_refused(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "policy")
    path = tmp_path / "policy/model.safetensors"
    save_file({f"other.{name}": value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(TrainerError, match=r"its files know no model\.embed"):
        Trainer(tmp_path / "policy", TrainingConfig(), seed=0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="not a causal language model") as caught:
        Trainer(tmp_path, TrainingConfig(), seed=0)
    assert not caught.value.retryable
