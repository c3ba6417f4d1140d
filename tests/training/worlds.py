"""A tiny policy, a database and recorded episodes: what an update finds when it begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sqlalchemy import Engine
from sqlmodel import SQLModel
from temporalio.testing import ActivityEnvironment

from activities.publication.activities import PublicationActivities
from activities.training.activities import TrainingActivities
from activities.training.service import TrainerService
from storage.database import open_database, session
from storage.objects import ObjectStore
from storage.tables import Batch, BatchMember, Episode, Group, Run, Turn
from workflows.config import RunConfig
from workflows.contracts import (
    FinishReason,
    PublishInput,
    PublishOutput,
    ReserveBatchInput,
    ScoreInput,
    ScoreOutput,
    Segment,
    TrainerInput,
    TrainerOutput,
    UpdateInput,
    UpdateOutput,
)

VOCABULARY = 61
SEGMENTS = "segments"
"""Where the segments of all runs lie in the tests' store, by content: most are every run's."""
TEMPERATURE = 0.8


def write_policy(folder: Path, *, seed: int = 0) -> Path:
    """A random Qwen3 with tied embeddings, 0.1 M parameters, and a word-level tokenizer smaller than its vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY - 3)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def segments_of(rng: np.random.Generator, *, version: int = 0, shift: float = 0.0) -> list[Segment]:
    """Two turns: a prompt of 3 to 6 tokens and an answer of 2 to 9, then an observation and an answer.

    `shift` of the answers' log-probabilities makes them tokens of a policy that is far away."""
    made = []
    for turn in range(2):
        prompt, answer = int(rng.integers(3, 7)), int(rng.integers(2, 10))
        made.append(
            Segment(
                turn=turn,
                token_ids=rng.integers(0, VOCABULARY, prompt + answer).tolist(),
                loss_mask=[0] * prompt + [1] * answer,
                logprobs=[0.0] * prompt + (-4.1 + shift + 0.05 * rng.standard_normal(answer)).tolist(),
                versions=[-1] * prompt + [version] * answer,
                temperature=TEMPERATURE,
                finish_reason=FinishReason.STOP,
                text="",
                engine="local-e0",
            )
        )
    return made


@dataclass
class World:
    """One run with its services. A worker's death is `restarted()`: a new service over the same store and database."""

    run: str
    policy: Path
    store: ObjectStore
    database: Engine
    folder: Path
    training: dict[str, Any]
    keep_last: int = 2

    def __post_init__(self) -> None:
        self.service = TrainerService(self.store, self.folder / "spool")
        self.trains = TrainingActivities(
            self.service, self.store, self.database, self.folder / "spool", self.policy.parent
        )
        self.publishes = PublicationActivities(self.service, self.store, self.database, self.folder / "spool")

    @classmethod
    def told(cls, given: dict[str, Any]) -> World:
        """The world that another process describes with `telling`."""
        return cls(
            given["run"],
            Path(given["policy"]),
            ObjectStore.connect(**given["access"]),
            open_database(given["database"]),
            Path(given["folder"]),
            given["training"],
        )

    def telling(self, access: dict[str, str]) -> dict[str, Any]:
        """What another process needs to know; `access` is the store's."""
        return {
            "run": self.run,
            "policy": str(self.policy),
            "access": access,
            "database": str(self.database.url),
            "folder": str(self.folder),
            "training": self.training,
        }

    def restarted(self) -> World:
        self.service.close()
        self.__post_init__()
        return self

    @property
    def config(self) -> dict[str, object]:
        raw = {
            "model": str(self.policy),
            "seed": 7,
            "training": {"learning_rate": 1e-2, "max_mismatch_kl": 1e3, "max_divergence": 1e3, **self.training},
            "rollout": {"groups_per_batch": 2},
            "publication": {"keep_last": self.keep_last},
        }
        return RunConfig.model_validate(raw).model_dump(mode="json")

    def open(self) -> World:
        with session(self.database) as opened:
            opened.add(Run(id=self.run, state="running", mode="sync", seed=7, started_at=0.0))
        return self

    def reserve(
        self,
        step: int,
        *,
        groups: int = 2,
        size: int = 4,
        version: int | None = None,
        tries: int = 0,
        shift: float = 0.0,
    ) -> str:
        """Episodes with segments in the store, in a reserved batch: the same for the same step, in every run."""
        rng = np.random.default_rng(step)
        batch_id = batch_name(self.run, step, tries)
        version = step - 1 if version is None else version
        with session(self.database) as opened:
            opened.add(Batch(id=batch_id, run=self.run, step=step, policy_version=step - 1, reserved_at=0.0))
            opened.flush()
            for position in range(groups * size):
                group_id = f"{self.run}/g{step * 100 + tries * 10 + position // size}"
                attempt_id = f"{group_id}/e{position % size}/a1"
                reward = float(position % size == 0 or rng.random() < 0.4)
                reward = 0.0 if position % size == 1 else reward
                opened.add(_episode(self.run, group_id, attempt_id, reward))
                opened.flush()
                for segment in segments_of(rng, version=version, shift=shift):
                    data = segment.model_dump_json().encode()
                    key = f"{SEGMENTS}/{hashlib.sha256(data).hexdigest()}"
                    self.store.put(key, data)
                    opened.add(Turn(episode=attempt_id, turn=segment.turn, segment=key))
                opened.add(BatchMember(episode=attempt_id, batch=batch_id, group_id=group_id, position=position))
        return batch_id

    async def start(self, resume: str = "") -> TrainerOutput:
        message = TrainerInput(run=self.run, config=self.config, resume_checkpoint=resume)
        return await ActivityEnvironment().run(self.trains.start_trainer, message)

    async def update(self, step: int, tries: int = 0) -> UpdateOutput:
        message = UpdateInput(
            run=self.run,
            config=self.config,
            batch_id=batch_name(self.run, step, tries),
            step=step,
            policy_version=step - 1,
        )
        return await ActivityEnvironment().run(self.trains.update, message)

    def close_groups(self, *numbers: int) -> None:
        """Rows of closed groups, which `reserve` does not write."""
        with session(self.database) as opened:
            for number in numbers:
                opened.add(
                    Group(
                        id=f"{self.run}/g{number}",
                        run=self.run,
                        task="shell/x",
                        number=number,
                        eligible=True,
                        started_at=0.0,
                        closed_at=0.0,
                    )
                )

    async def score(self, checkpoint: str, *numbers: int) -> ScoreOutput:
        message = ScoreInput(run=self.run, config=self.config, checkpoint=checkpoint, groups=list(numbers))
        return await ActivityEnvironment().run(self.trains.score, message)

    async def publish(self, version: int, checkpoint: str) -> PublishOutput:
        message = PublishInput(run=self.run, config=self.config, version=version, step=version, checkpoint=checkpoint)
        return await ActivityEnvironment().run(self.publishes.publish, message)


def batch_name(run: str, step: int, tries: int) -> str:
    return ReserveBatchInput(run=run, step=step, policy_version=0, groups=[], tries=tries).batch_id


def _episode(run: str, group_id: str, attempt_id: str, reward: float) -> Episode:
    return Episode(
        id=attempt_id,
        episode_id=attempt_id.rsplit("/", 1)[0],
        group_id=group_id,
        run=run,
        kind="train",
        task="shell/x",
        attempt=1,
        outcome="model_success" if reward else "model_failure",
        stop_reason="finished",
        reward=reward,
        started_at=0.0,
        ended_at=0.0,
    )


def empty_database(path: Path) -> Engine:
    database = open_database(f"sqlite:///{path}")
    SQLModel.metadata.create_all(database)
    return database


Worlds = Callable[..., World]
"""The fixture `world`: another run each time, with the given fields of `training`."""


def weights_of(world: World) -> dict[str, torch.Tensor]:
    trainer = world.service._trainer
    assert trainer is not None
    return {name: value.clone() for name, value in trainer.weights().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
