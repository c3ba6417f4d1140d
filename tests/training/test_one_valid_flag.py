"""One valid flag, over the real path: records and rows in SQLite, the group's closing, the reservation, trajectories,
advantages, the loss and its gradient. Only the network is a stand-in, small enough for many examples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from activities.training import ledger
from activities.training.activities import TrainingActivities
from activities.training.batch import MicroBatch, Trajectory
from activities.training.logprobs import sampled_logprobs
from activities.training.update import make_update
from activities.training.work import Work
from storage import queries
from storage.database import session
from storage.tables import Batch, Run
from tests.training.worlds import VOCABULARY, empty_database, segments_of
from workflows.closing import close_group
from workflows.config import RunConfig
from workflows.contracts import (
    BatchWait,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    GroupInput,
    GroupResult,
    Outcome,
    ShortGroup,
    Split,
    StopReason,
    TaskRef,
    TurnRecord,
)
from workflows.errors import StorageError, TrainerError

RUNS = itertools.count()
TASK = TaskRef(taskset="shell", split=Split.TRAIN, task_id="count-17")
CONFIG = RunConfig.model_validate(
    {
        "model": "tiny",
        "rollout": {"groups_per_batch": 2},
        "training": {"minibatches": 2, "micro_batch_tokens": 64, "max_mismatch_kl": 1e3, "max_divergence": 1e3},
    }
)


@dataclass(frozen=True)
class Junk:
    """An attempt that is not valid, with whatever in it."""

    outcome: Outcome
    reward: float | None
    tokens: int
    version: int | None
    content: bytes | None
    """Of its one segment; None: it has no turn."""


@dataclass(frozen=True)
class Sibling:
    """A valid attempt, and the invalid ones that it replaced."""

    reward: float
    seed: int
    replaced: list[Junk] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    advantages: dict[tuple[int, int], float]
    """By group and the valid sibling's place."""
    denominators: tuple[float, ...]
    gradients: list[bytes]


class MemoryStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self.objects[key]


class TinyTrainer:
    """What `make_update` asks of a trainer, over an embedding and a linear layer. Keeps the gradient of each step."""

    device = torch.device("cpu")
    updates, rank, world_size = 0, 0, 1
    half_done = False
    routing = None

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
        self.gradients: list[bytes] = []

    def logprobs(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BTV = self.module(micro.token_ids_BT)
        return sampled_logprobs(logits_BTV, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)

    def accumulate(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def optimizer_step(self, *, learning_rate: float, weight_decay: float) -> float:
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.module.parameters()])
        self.gradients.append(gradient.numpy().tobytes())
        self.module.zero_grad()
        return float(gradient.norm())


class Course:
    """One run from recorded attempts to gradients."""

    def __init__(self, database: Engine) -> None:
        self.database, self.store, self.run = database, MemoryStore(), f"run{next(RUNS)}"
        with session(database) as opened:
            opened.add(Run(id=self.run, state="running", mode="sync", seed=0, started_at=0.0))

    def record(self, attempt_id: str, **fields: Any) -> EpisodeSummary:
        """Write the attempt's rows; what its group learns of it."""
        episode_id = attempt_id.rpartition("/")[0]
        record = EpisodeRecord(
            attempt_id=attempt_id,
            episode_id=episode_id,
            group_id=episode_id.rpartition("/")[0],
            run=self.run,
            kind=EpisodeKind.TRAIN,
            task=TASK,
            attempt=int(attempt_id.rpartition("/a")[2]),
            stop_reason=StopReason.FINISHED,
            **fields,
        )
        with session(self.database) as opened:
            queries.put_episode(opened, record=record)
        return EpisodeSummary(**{name: getattr(record, name) for name in EpisodeSummary.model_fields})

    def valid(self, attempt_id: str, sibling: Sibling) -> EpisodeSummary:
        made = segments_of(np.random.default_rng(sibling.seed))
        keys = [f"{attempt_id}/t{segment.turn}" for segment in made]
        self.store.objects |= {key: item.model_dump_json().encode() for key, item in zip(keys, made, strict=True)}
        return self.record(
            attempt_id,
            outcome=Outcome.MODEL_SUCCESS if sibling.reward else Outcome.MODEL_FAILURE,
            reward=sibling.reward,
            min_version=0,
            max_version=0,
            turns=[TurnRecord(turn=turn, segment=key) for turn, key in enumerate(keys)],
        )

    def invalid(self, attempt_id: str, junk: Junk) -> EpisodeSummary:
        key = f"{attempt_id}/t0"
        if junk.content is not None:
            self.store.objects[key] = junk.content
        return self.record(
            attempt_id,
            outcome=junk.outcome,
            reward=junk.reward,
            sampled_tokens=junk.tokens,
            min_version=junk.version,
            max_version=junk.version,
            turns=[] if junk.content is None else [TurnRecord(turn=0, segment=key)],
        )

    def group(self, number: int, siblings: list[Sibling | Junk]) -> GroupResult:
        """Write the group's attempts and its row, as its workflow closes it."""
        ends = []
        for index, sibling in enumerate(siblings):
            episode_id = f"{self.run}/g{number}/e{index}"
            if isinstance(sibling, Junk):
                ends.append(self.invalid(f"{episode_id}/a0", sibling))
                continue
            for attempt, junk in enumerate(sibling.replaced):
                self.invalid(f"{episode_id}/a{attempt}", junk)
            ends.append(self.valid(f"{episode_id}/a{len(sibling.replaced)}", sibling))
        result = close_group(self._input(number, len(siblings)), ends)
        with session(self.database) as opened:
            queries.put_group(opened, run=self.run, result=result)
        return result

    def _input(self, number: int, size: int) -> GroupInput:
        return GroupInput(
            run=self.run,
            number=number,
            model="tiny",
            task=TASK,
            group_size=size,
            max_replacements=4,
            limits=CONFIG.rollout.limits(),
            seed=0,
            report_to=self.run,
            short_group=ShortGroup.TRAIN,
        )

    def reserve(self, groups: list[GroupResult]) -> None:
        with session(self.database) as opened:
            queries.reserve_batch(
                opened,
                batch_id=f"{self.run}/b1",
                run=self.run,
                step=1,
                policy_version=0,
                groups=groups,
                wait=BatchWait(seconds=1.0),
            )

    def trajectories(self) -> list[Trajectory]:
        trains = TrainingActivities(SimpleNamespace(), self.store, self.database, Path(), Path())  # type: ignore[arg-type]
        return trains._trajectories(ledger.members_of(self.database, f"{self.run}/b1"), Work())


def trained(database: Engine, groups: list[list[Sibling | Junk]]) -> Trained:
    path, trainer = Course(database), TinyTrainer()
    results = [path.group(number, siblings) for number, siblings in enumerate(groups)]
    assert all(result.eligible for result in results)
    path.reserve(results)
    batch = path.trajectories()
    made = make_update(trainer, batch, config=CONFIG, step=1, policy_version=0, work=Work())  # type: ignore[arg-type]
    places = {
        member: (number, place) for number, result in enumerate(results) for place, member in enumerate(result.members)
    }
    counted = tuple(made.metrics[name] for name in ("episodes", "sampled_tokens", "trained_tokens", "loss"))
    return Trained({places[name]: value for name, value in made.advantages.items()}, counted, trainer.gradients)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    database = empty_database(tmp_path_factory.mktemp("rows") / "lineage.db")
    yield database
    database.dispose()


junk = st.builds(
    Junk,
    outcome=st.sampled_from([outcome for outcome in Outcome if not outcome.valid]),
    reward=st.floats() | st.none(),
    tokens=st.integers(0, 10**9),
    version=st.integers(-9, 99) | st.none(),
    content=st.binary(max_size=20) | st.none(),
)
sibling = st.builds(
    Sibling, reward=st.sampled_from([0.0, 0.25, 1.0]), seed=st.integers(0, 99), replaced=st.lists(junk, max_size=2)
)
group = st.tuples(st.lists(sibling, min_size=2, max_size=4), st.lists(st.tuples(st.integers(0, 9), junk), max_size=4))


@settings(max_examples=40)
@given(st.lists(group, min_size=1, max_size=2))
def test_invalid_siblings_change_no_advantage_no_denominator_and_no_gradient_to_the_bit(
    rows: Engine, groups: list[tuple[list[Sibling], list[tuple[int, Junk]]]]
) -> None:
    alone: list[list[Sibling | Junk]] = []
    beside: list[list[Sibling | Junk]] = []
    for siblings, others in groups:
        assume(len({item.reward for item in siblings}) > 1)
        alone.append([Sibling(item.reward, item.seed) for item in siblings])
        mixed: list[Sibling | Junk] = list(siblings)
        for place, other in others:
            mixed.insert(min(place, len(mixed)), other)
        beside.append(mixed)
    expected, got = trained(rows, alone), trained(rows, beside)
    assert got.advantages == expected.advantages
    assert got.denominators == expected.denominators
    assert got.gradients == expected.gradients


@settings(max_examples=40)
@given(junk, st.integers(0, 2))
def test_an_attempt_that_is_not_valid_gets_into_no_batch_even_if_someone_asks_for_it(
    rows: Engine, other: Junk, place: int
) -> None:
    path = Course(rows)
    honest = path.group(0, [Sibling(1.0, 1), Sibling(0.0, 2), other])
    forged = list(honest.members)
    forged.insert(place, f"{path.run}/g0/e2/a0")
    with pytest.raises(StorageError, match=r"no valid episode row for .*/g0/e2/a0") as caught:
        path.reserve([honest.model_copy(update={"members": forged, "rewards": [1.0, 0.0, 1.0]})])
    assert not caught.value.retryable
    with session(rows) as opened:
        assert opened.get(Batch, f"{path.run}/b1") is None
    path.reserve([honest])


def test_an_attempt_that_stops_being_valid_after_its_reservation_stops_the_update(rows: Engine) -> None:
    path = Course(rows)
    honest = path.group(0, [Sibling(1.0, 1), Sibling(0.0, 2)])
    path.reserve([honest])
    path.invalid(honest.members[0], Junk(Outcome.INFRA_FAILURE, 1.0, 5, 0, None))
    with pytest.raises(TrainerError, match=r"e0/a0 \(infra_failure\) is in batch") as caught:
        path.trajectories()
    assert not caught.value.retryable
