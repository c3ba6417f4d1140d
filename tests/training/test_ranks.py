"""A trainer of two processes under DeepSpeed's launcher: the same gradients as one, and the same resume to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from activities.lifetime import RANKED, launched_rank
from activities.training import ledger, ranks
from activities.training.update import make_update
from activities.training.work import Work
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Batch
from tests.training.fixtures import making_worlds
from tests.training.worlds import World, Worlds, assert_equal, weights_of
from workers.ranked import command
from workers.stack.ports import free_ports
from workflows.config import RunConfig

HOW = {
    "learning_rate": 0.5,
    "warmup_steps": 0,
    "max_grad_norm": 1e6,
    "minibatches": 2,
    "micro_batch_tokens": 64,
}
MOMENTUM = {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
"""A step moves the weights by the gradient, and the optimizer has a state all the same."""
ADAM = HOW | {"learning_rate": 1e-3, "reshape_checkpoint": True}


def asked(run: World, access: dict[str, str], **what: Any) -> dict[str, Any]:
    return {**run.telling(access), "start": True, "score": [], "steps": [1, 2, 3], **what}


def run_ranked(folder: Path, **runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What two processes did with each run in turn, by step its metrics; the weights lie in folders of the runs' names.
    A run without an entry did not come to its end."""
    folder.mkdir()
    (folder / "asked.json").write_text(json.dumps(runs))
    (port,) = free_ports(1)
    launch = command(2, port, "tests.training.ranked_worker", str(folder / "asked.json"))
    extra = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", RANKED), "1")
    log = folder / "log"
    with log.open("wb") as out:
        subprocess.run([sys.executable, *launch], env=os.environ | extra, check=False, stdout=out, stderr=out)
    done = {name: folder / name / "done.json" for name in runs}
    for name, path in done.items():
        ends = not runs[name].keys() & {"dies_in", "left_in"}
        assert path.is_file() == ends, log.read_text()[-6000:]
    return {name: json.loads(path.read_text()) for name, path in done.items() if path.is_file()}


@dataclass
class Runs:
    """Runs by ZeRO stage, of one process (`one`) and of two, and one with AdamW (`two`): what the first two processes
    made of them lies in the folder `a`, and those in `killed` are not at their ends."""

    folder: Path
    one: dict[str, World]
    straight: dict[str, World]
    killed: dict[str, World]
    two: World
    done: dict[str, dict[str, Any]]

    def weights(self, launch: str, name: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / launch / name / f"{step}.safetensors")


@pytest.fixture(scope="module")
def runs(
    policy: Path, s3: ObjectStore, s3_access: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """One launch serves all: its start costs far more than the updates."""
    folder = tmp_path_factory.mktemp("ranks")
    with making_worlds(policy, s3, folder) as world:
        hows = {stage: HOW | {"deepspeed": {"zero_optimization": {"stage": int(stage)}, **MOMENTUM}} for stage in "23"}
        one, straight, killed = ({stage: world(**how) for stage, how in hows.items()} for _ in range(3))
        two = world(**ADAM)
        for run in (*one.values(), *straight.values(), *killed.values(), two):
            for step in (1, 2, 3):
                run.reserve(step)
            run.close_groups(200, 201)
        told = {stage: asked(run, s3_access, score=[200, 201]) for stage, run in straight.items()}
        told |= {"two": asked(two, s3_access), "left": asked(killed["2"], s3_access, left_in=2)}
        told |= {"killed": asked(killed["3"], s3_access, dies_in=2)}
        yield Runs(folder, one, straight, killed, two, run_ranked(folder / "a", **told))


async def test_two_processes_make_the_steps_of_one_and_end_equal_to_the_bit_where_one_is_killed(
    runs: Runs, s3_access: dict[str, str]
) -> None:
    """ZeRO 2 and 3; an odd number of micro-batches, so that one counts for nothing. SIGKILL of rank 1 with both runs
    between the gradient steps of update 2 and its checkpoint: rank 0 ends with it, the next two processes make updates
    2 and 3."""
    for stage, one in runs.one.items():
        await one.start()
        alone, expected = await one.update(1), weights_of(one)
        apart = (await one.score(alone.checkpoint, 200, 201)).divergences
        made, first = runs.done[stage], runs.weights("a", stage, 1)
        assert made["world_size"] == 2
        assert first.keys() == expected.keys()
        for name, value in expected.items():
            assert float((first[name] - value).abs().max()) < 1e-6, (stage, name)
        for name in ("loss", "grad_norm", "clip_share", "entropy", "padded_tokens", "off_policy/divergence"):
            assert made["1"][name] == pytest.approx(alone.metrics[name], rel=1e-4, abs=1e-7), (stage, name)
        assert made["divergences"] == pytest.approx(apart, rel=1e-3)

    assert (runs.folder / "a" / "killed" / "1.safetensors").is_file(), "it came as far as update 2"
    for run in runs.killed.values():
        with session(run.database) as opened:
            batch = opened.get_one(Batch, f"{run.run}/b2")
        assert (batch.state, batch.fence) == (ledger.RESERVED, 1), "begun and not committed"
    again = run_ranked(
        runs.folder / "b",
        **{stage: asked(run, s3_access, start=False, steps=[2, 3]) for stage, run in runs.killed.items()},
    )
    for stage in runs.killed:
        assert [again[stage][step]["loss"] for step in "23"] == [runs.done[stage][step]["loss"] for step in "23"]
        first = runs.weights("a", stage, 1)
        whole, resumed = runs.weights("a", stage, 3), runs.weights("b", stage, 3)
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert any(not torch.equal(whole[name], first[name]) for name in whole)


async def test_one_process_goes_on_from_the_state_of_two_where_it_is_told_to(runs: Runs, world: Worlds) -> None:
    """AdamW at ZeRO 2: two processes make updates 1 to 3; one takes over their state after 2 and makes 3 the same."""
    two = runs.two
    with session(two.database) as opened:
        checkpoint = opened.get_one(Batch, f"{two.run}/b2").checkpoint
    one = world(**ADAM)
    for step in (1, 2, 3):
        one.reserve(step)
    config = RunConfig.model_validate(one.config)
    trainer = one.service.at(checkpoint, config, Work())
    second, third = (runs.weights("a", "two", step) for step in (2, 3))
    assert_equal(trainer.weights(), second)
    assert trainer.updates == 2
    batch = one.trains._trajectories(ledger.members_of(one.database, f"{one.run}/b3"), Work())
    make_update(trainer, batch, config=config, step=3, policy_version=2, work=Work())
    for name, value in trainer.weights().items():
        assert float((value - third[name]).abs().max()) < 1e-6, name
        assert not torch.equal(third[name], second[name])


def test_the_ranks_of_a_job_that_the_stack_was_started_in_are_not_the_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert launched_rank() is None and ranks.launched() == 1
    monkeypatch.setenv(RANKED, "1")
    assert launched_rank() == 3 and ranks.launched() == 8


@given(st.integers(0, 40), st.integers(1, 8))
def test_every_part_is_one_ranks_and_all_ranks_take_equally_many(count: int, processes: int) -> None:
    patched = pytest.MonkeyPatch()
    patched.setattr(ranks, "world_size", lambda: processes)
    found = ranks.shares(count)
    patched.undo()
    assert len({len(part) for part in found}) == 1 and len(found) == processes
    assert sorted(index for part in found for index in part if index >= 0) == list(range(count))
