"""The trainer's activities against a real store and database: what an update commits, once."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlmodel import col, select

from activities.training import activities as training_activities
from activities.training import ledger
from activities.training.engine import Trainer
from activities.training.logprobs import k3
from storage import archive
from storage.database import session
from storage.scores import by_turn, read_scores, scores_key
from storage.tables import Batch, BatchMember, Episode, Group, PolicyVersion, Turn
from tests.training.worlds import World, Worlds, assert_equal, weights_of
from workflows.config import TrainingConfig
from workflows.contracts import Segment
from workflows.errors import FencedError, TrainerError


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


async def test_an_update_keeps_the_log_probabilities_that_it_scored_the_batch_with(world: Worlds) -> None:
    run = world(micro_batch_tokens=64)
    await run.start()
    run.reserve(1)
    output = await run.update(1)
    with session(run.database) as opened:
        batch = opened.get_one(Batch, f"{run.run}/b1")
        keys = opened.exec(select(Turn.episode, Turn.segment).order_by(col(Turn.turn))).all()
    kept = read_scores(run.store, scores_key(run.run, 1, batch.fence))
    assert kept.policy_version == batch.policy_version and kept.logprobs
    k3s: list[float] = []
    for attempt, branches in kept.logprobs.items():
        mine = [Segment.model_validate_json(run.store.get(str(key))) for episode, key in keys if episode == attempt]
        scored = by_turn(dict(enumerate(mine)), branches)
        for turn, segment in enumerate(mine):
            engine = torch.tensor(segment.logprobs)[torch.tensor(segment.loss_mask) > 0]
            k3s += k3(torch.tensor(scored[turn]), engine).tolist()
    assert fmean(k3s) == pytest.approx(output.metrics["off_policy/divergence"], rel=1e-4)


async def test_a_trained_batch_answers_with_what_was_recorded_and_trains_nothing(world: Worlds) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    first = await run.update(1)
    after = weights_of(run)
    again = await run.update(1)
    assert (again.checkpoint, again.metrics, again.step) == (first.checkpoint, first.metrics, 1)
    assert_equal(weights_of(run), after)


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


async def test_scoring_tells_each_groups_distance_from_a_state_and_changes_nothing(world: Worlds) -> None:
    """Groups of random tokens, and the same with log-probabilities 3 nats too low: a wider gap by k3's growth."""
    run = world(micro_batch_tokens=64)
    started = await run.start()
    before = weights_of(run)
    run.reserve(1)
    run.reserve(2, shift=-3.0)
    run.close_groups(100, 101, 200, 201)
    found = (await run.score(started.checkpoint, 100, 201, 101, 200)).divergences
    near, far = (found[0], found[2]), (found[1], found[3])
    assert len(found) == 4 and max(near) < min(far)
    assert_equal(weights_of(run), before)
    updated = await run.update(1)
    assert (await run.score(updated.checkpoint, 100)).divergences != [found[0]], "of the state that was asked for"
    assert (await run.score(started.checkpoint, 100)).divergences == [found[0]]
    assert (await run.update(2)).step == 2, "the trainer goes on from its committed state"


async def test_an_archived_success_trains_as_a_sibling_of_the_group_that_it_joined(world: Worlds) -> None:
    """g200 has no success of its own; one of g100, made by a policy that is far away, joins it."""
    run = world()
    await run.start()
    run.reserve(1, shift=-1.5)
    first = await run.update(1)
    run.reserve(2)
    run.close_groups(200, 201)
    archived = f"{run.run}/g100/e0/a1"
    with session(run.database) as opened:
        for index in range(4):
            episode = opened.get(Episode, f"{run.run}/g200/e{index}/a1")
            assert episode is not None
            episode.reward, episode.outcome = 0.0, "model_failure"
            opened.add(episode)
        trained_before = opened.get(BatchMember, archived)
    alone = (await run.score(first.checkpoint, 200)).divergences
    with session(run.database) as opened:
        group = opened.get(Group, f"{run.run}/g200")
        assert group is not None
        group.replay = archived
        opened.add(group)
    assert (await run.score(first.checkpoint, 200)).divergences[0] > alone[0] + 0.1
    with session(run.database) as opened:
        assert archive.use(opened, batch_id=f"{run.run}/b2", group_ids=[f"{run.run}/g200", f"{run.run}/g201"]) == 1
    output = await run.update(2)
    with session(run.database) as opened:
        (use,) = archive.uses_in(opened, batch_id=f"{run.run}/b2")
        siblings = opened.exec(select(BatchMember).where(BatchMember.group_id == f"{run.run}/g200")).all()
        names = [f"{run.run}/g200", f"{run.run}/g201"]
        fresh = opened.exec(select(Episode).where(col(Episode.group_id).in_(names))).all()
        assert opened.get(BatchMember, archived) == trained_before, "what it was in its own batch stays"
    assert output.metrics["replayed"] == 1 and output.metrics["episodes"] == 9
    assert output.metrics["reward_mean"] == pytest.approx(sum(one.reward or 0 for one in fresh) / 8)
    assert use.advantage is not None and use.advantage > 0
    (shared,) = {member.advantage for member in siblings}
    assert shared is not None and 4 * shared + use.advantage == pytest.approx(0, abs=1e-9)


async def test_a_mismatch_between_the_two_limits_is_a_warning_that_a_retry_repeats(world: Worlds) -> None:
    run = world(warn_mismatch_kl=1e-9, max_mismatch_kl=1e3)
    await run.start()
    run.reserve(1)
    first, again = await run.update(1), await run.update(1)
    assert "is above training.warn_mismatch_kl 1.00e-09" in first.warning and again.warning == first.warning
    quiet = world(warn_mismatch_kl=1e3)
    await quiet.start()
    quiet.reserve(1)
    assert (await quiet.update(1)).warning == ""


FAR = {"shift": -3.0}
"""The tokens of a policy beyond the limit of `void_world`."""


def void_world(world: Worlds) -> World:
    return world(max_divergence=0.5)


async def test_a_batch_that_teaches_nothing_is_void_and_answers_the_same_after_a_crash(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = void_world(world)
    await run.start()
    run.reserve(1, **FAR)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "commit_void", die)
        with pytest.raises(RuntimeError, match="killed"):
            await run.update(1)
    first = await run.restarted().update(1)
    again = await run.update(1)
    assert first.void == "all 2 groups with a signal are beyond training.max_divergence 0.5"
    assert (first.step, first.checkpoint, first.dropped) == (1, "", {"beyond_divergence": 2})
    assert again.model_copy(update={"timing": first.timing}) == first
    with session(run.database) as opened:
        batch = opened.get(Batch, f"{run.run}/b1")
        members = opened.exec(select(BatchMember)).all()
    assert batch is not None and (batch.state, batch.reason, batch.fence) == ("void", first.void, 2)
    assert len(members) == 8 and all(member.advantage is None for member in members)
    assert [key for key, _ in run.store.keys(f"runs/{run.run}/state/")] == [
        f"runs/{run.run}/state/s000000/f0000/manifest.json"
    ]


async def test_a_try_that_was_overtaken_cannot_void_a_batch(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = void_world(world)
    await run.start()
    run.reserve(1, **FAR)
    share = ledger.short_share

    def overtaken(*args: object) -> float:
        ledger.take_fence(run.database, f"{run.run}/b1")
        return share(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "short_share", overtaken)
        with pytest.raises(FencedError, match="try 1 is outdated, now 2"):
            await run.update(1)
    with session(run.database) as opened:
        batch = opened.get(Batch, f"{run.run}/b1")
        assert batch is not None and (batch.state, batch.reason) == ("reserved", "")


async def test_a_step_after_void_batches_is_that_of_a_run_without_them_to_the_bit(world: Worlds) -> None:
    straight, run = void_world(world), void_world(world)
    for item in (straight, run):
        await item.start()
        item.reserve(1)
    await straight.update(1)
    await run.update(1)
    straight.reserve(2)
    await straight.update(2)
    for tries in range(2):
        run.reserve(2, tries=tries, **FAR)
        assert (await run.update(2, tries)).void
    run.reserve(2, tries=2)
    output = await run.update(2, 2)
    assert not output.void and output.step == 2
    assert_equal(weights_of(straight), weights_of(run))
    await run.publish(2, output.checkpoint)
    run.reserve(3)
    await run.update(3)
    with session(run.database) as opened:
        states = {row.id.partition("/")[2]: row.state for row in opened.exec(select(Batch).where(Batch.run == run.run))}
        version = opened.get(PolicyVersion, (run.run, 2))
    assert states == {"b1": "trained", "b2": "void", "b2.1": "void", "b2.2": "published", "b3": "trained"}
    assert version is not None and version.batch == f"{run.run}/b2.2"


async def test_the_share_of_short_groups_is_a_metric_of_the_batch(world: Worlds) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    with session(run.database) as opened:
        for number, short in ((100, True), (101, False)):
            group_id = f"{run.run}/g{number}"
            opened.add(
                Group(
                    id=group_id,
                    run=run.run,
                    task="shell/x",
                    number=number,
                    eligible=True,
                    short=short,
                    started_at=0.0,
                    closed_at=0.0,
                )
            )
    assert (await run.update(1)).metrics["groups/short_share"] == 0.5


async def test_a_step_does_not_begin_before_the_one_before_it_is_trained(world: Worlds) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    run.reserve(2)
    with pytest.raises(TrainerError, match="step 1 is not trained"):
        await run.update(2)


async def test_engine_and_trainer_that_compute_different_models_stop_the_run(world: Worlds) -> None:
    run = world(max_mismatch_kl=1e-6)
    await run.start()
    run.reserve(1)
    with pytest.raises(TrainerError, match=r"mismatch_kl .* is above training\.max_mismatch_kl") as caught:
        await run.update(1)
    assert not caught.value.retryable


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_metric_that_is_no_number_ends_the_run_with_its_name_and_the_step_is_not_kept(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    run = world()
    await run.start()
    run.reserve(1)
    with monkeypatch.context() as patched:
        patched.setattr("activities.training.update.agreement", lambda *_: {"mismatch_kl/mean": 0.0, "ratio": value})
        with pytest.raises(TrainerError, match=rf"step 1: ratio is {value}; the step is not kept") as caught:
            await run.update(1)
    assert not caught.value.retryable
    # The weights that the broken step made are not gone on from.
    whole = world()
    await whole.start()
    whole.reserve(1)
    await whole.update(1)
    await run.update(1)
    assert_equal(weights_of(run), weights_of(whole))


def test_a_model_whose_files_name_tensors_otherwise_is_refused(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "policy")
    path = tmp_path / "policy/model.safetensors"
    save_file({f"other.{name}": value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(TrainerError, match=r"its files know no model\.embed"):
        Trainer(tmp_path / "policy", TrainingConfig(), seed=0)


def test_a_folder_that_is_not_there_is_refused_without_asking_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *asked, **how: pytest.fail(f"{asked} was looked up"))
    with pytest.raises(TrainerError, match="nowhere: there is no such folder") as caught:
        Trainer(Path("nowhere"), TrainingConfig(), seed=0)
    assert not caught.value.retryable


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="not a causal language model") as caught:
        Trainer(tmp_path, TrainingConfig(), seed=0)
    assert not caught.value.retryable
