"""What a dead trainer leaves, and how another goes on from it: to the bit, or refused."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from activities.publication.manifest import read_manifest
from activities.training import activities as training_activities
from activities.training import ledger
from activities.training.engine import Trainer
from activities.training.work import Stopped, Work
from storage.database import session
from storage.tables import Batch, Run
from tests.training.worlds import Worlds, assert_equal, weights_of
from workflows.config import RunConfig
from workflows.errors import StorageError, TrainerError


@pytest.mark.parametrize(("stage", "lora_rank"), [(0, 0), (3, 0), (2, 4), (3, 4)])
async def test_a_resumed_run_is_equal_to_the_bit(world: Worlds, stage: int, lora_rank: int) -> None:
    """Three updates straight, against one, death, and two. ZeRO 2 without an adapter: the killed process below."""
    training = {"deepspeed": {"zero_optimization": {"stage": stage}}, "minibatches": 2, "lora_rank": lora_rank}
    straight, broken = world(**training), world(**training)
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


@pytest.mark.parametrize("updates", [0, 1])
async def test_a_restarted_trainer_takes_up_the_running_runs_state_before_it_is_asked(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    straight, broken = world(), world()
    for run in (straight, broken):
        await run.start()
        for step in (1, 2):
            run.reserve(step)
        for step in range(1, updates + 1):
            await run.update(step)
    with session(broken.database) as opened:
        row = opened.get_one(Run, broken.run)
        # As run.json has it: a policy by its name.
        row.config, row.started_at = broken.config | {"model": broken.policy.name}, 1.0
        # One that began later has ended: it goes on with nothing.
        opened.add(Run(id="ended", state="finished", mode="sync", seed=7, started_at=2.0, ended_at=3.0))
    broken.restarted()
    await broken.trains.get_ready()
    monkeypatch.delattr("activities.training.service.load_training_state")
    for step in range(updates + 1, 3):
        await straight.update(step)
        await broken.update(step)
    assert_equal(weights_of(straight), weights_of(broken))


async def test_a_trainer_that_can_not_take_up_a_state_ahead_waits_to_be_asked(
    world: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    run = world()
    await run.trains.get_ready()
    with session(run.database) as opened:
        opened.get_one(Run, run.run).config = run.config
    await run.trains.get_ready()
    assert "not ready before the update" in caplog.text
    await run.start()
    run.reserve(1)
    assert (await run.update(1)).step == 1


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


async def test_where_states_are_saved_less_often_the_recorded_batches_lead_on_to_the_bit(world: Worlds) -> None:
    """Every third state is saved; the worker dies before and after each publication, and old states go."""
    straight, broken = world(minibatches=2), world(minibatches=2, checkpoint_every=3)
    broken.keep_last = 1
    digests: dict[str, list[str]] = {straight.run: [], broken.run: []}
    kinds, checkpoint = [], ""
    for run in (straight, broken):
        await run.start()
        for step in range(1, 6):
            run.reserve(step)
            checkpoint = (await run.update(step)).checkpoint
            if run is broken:
                kinds.append(read_manifest(run.store, checkpoint).kind)
                run.restarted()
            digests[run.run].append((await run.publish(step, checkpoint)).digest)
            if run is broken:
                run.restarted()
    assert kinds == ["redo", "redo", "training_state", "redo", "redo"]
    assert digests[broken.run] == digests[straight.run] and len(set(digests[broken.run])) == 5
    after = world(minibatches=2)
    first = await after.start(resume=checkpoint)
    assert (await after.publish(0, first.checkpoint)).digest == digests[straight.run][2], "the last one that was saved"


async def test_a_try_that_ends_while_batches_are_made_again_leaves_what_it_made_to_the_next(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = world(), world(checkpoint_every=10)
    for run in (straight, broken):
        await run.start()
        for step in (1, 2, 3, 4):
            run.reserve(step)
            await run.update(step)
    with session(broken.database) as opened:
        batch = opened.get(Batch, f"{broken.run}/b4")
    assert batch is not None
    broken.restarted()
    redo, made = broken.service.redo, list[str]()

    def fails_once(trainer: Trainer, batch_id: str, *rest: Any) -> None:
        made.append(batch_id.rpartition("/")[2])
        if made.count("b3") == 1 and made[-1] == "b3":
            raise StorageError("connection lost")
        redo(trainer, batch_id, *rest)

    monkeypatch.setattr(broken.service, "redo", fails_once)
    config = RunConfig.model_validate(broken.config)
    with pytest.raises(StorageError):
        broken.service.at(batch.checkpoint, config, Work())
    assert_equal(broken.service.at(batch.checkpoint, config, Work()).weights(), weights_of(straight))
    assert made == ["b1", "b2", "b3", "b1", "b2", "b3", "b4"], "half a step is never built upon"
    stop = Work()
    stop.say = lambda progress: stop.stop.set() if progress.endswith("b2 again") else None
    broken.restarted()
    made.clear()
    redo = broken.service.redo
    monkeypatch.setattr(broken.service, "redo", fails_once)
    made.append("b3")
    with pytest.raises(Stopped):
        broken.service.at(batch.checkpoint, config, stop)
    assert_equal(broken.service.at(batch.checkpoint, config, Work()).weights(), weights_of(straight))
    assert made == ["b3", "b1", "b2", "b3", "b4"], "what was made again stays"


async def test_the_last_state_of_a_run_is_saved_whatever_its_number(world: Worlds) -> None:
    run = world(checkpoint_every=3, steps=2)
    await run.start()
    for step in (1, 2):
        run.reserve(step)
    kinds = [read_manifest(run.store, (await run.update(step)).checkpoint).kind for step in (1, 2)]
    assert kinds == ["redo", "training_state"]


async def test_another_world_size_is_refused_with_both_numbers_and_the_way_out(world: Worlds) -> None:
    run = world()
    started = await run.start()
    manifest = read_manifest(run.store, started.checkpoint)
    two = manifest.model_copy(update={"world_size": 2})
    run.store.put("other/manifest.json", two.model_dump_json().encode())
    way_out = "world size 2, this trainer has 1: start it with RATCHET_TRAINER_PROCESSES=2, or a new run"
    with pytest.raises(TrainerError, match=way_out):
        await run.start("other/manifest.json")
    third = world(reshape_checkpoint=True, deepspeed={"zero_optimization": {"stage": 3}})
    with pytest.raises(TrainerError, match="works with ZeRO stages 1 and 2, this trainer has 3"):
        await third.start("other/manifest.json")


async def test_a_state_without_its_optimizer_is_an_error_and_not_a_warning(world: Worlds) -> None:
    run = world()
    started = await run.start()
    manifest = read_manifest(run.store, started.checkpoint)
    torn = manifest.model_copy(update={"files": [file for file in manifest.files if "optim" not in file.name]})
    run.store.put("torn/manifest.json", torn.model_dump_json().encode())
    with pytest.raises(TrainerError, match="lacks zero_pp_rank_0"):
        await run.start("torn/manifest.json")


async def test_cancelled_work_stops_between_parts_and_the_next_try_is_clean(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while the gradient of the first part is being made, of several."""
    whole, run = world(micro_batch_tokens=32), world(micro_batch_tokens=32)
    for item in (whole, run):
        await item.start()
        item.reserve(1)
    await whole.update(1)
    accumulate, parts = Trainer.accumulate, list[bool]()
    reached, cancelled = threading.Event(), threading.Event()

    def held(trainer: Trainer, loss: torch.Tensor, *, last: bool) -> None:
        parts.append(last)
        reached.set()
        assert cancelled.wait(60)
        accumulate(trainer, loss, last=last)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "accumulate", held)
        task = asyncio.create_task(run.update(1))
        assert await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await run.service.call(lambda work: None)
    assert parts == [False], "no further part was begun"
    await run.update(1)
    assert_equal(weights_of(whole), weights_of(run))


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
    given = killed.telling(s3_access)
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
