"""Publication without a trainer: the weights of each version are given. Store, database and all the rest are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import Engine
from temporalio.testing import ActivityEnvironment

from activities.generation.weights import WeightsCache
from activities.publication import activities as publication_activities
from activities.publication.activities import PublicationActivities
from activities.publication.manifest import (
    WEIGHTS_FILE,
    Canary,
    Manifest,
    TensorInfo,
    objects_prefix,
    read_manifest,
    training_state_key,
    upload_folder,
    write_manifest,
)
from activities.training.work import Work
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import EngineLoad
from workflows.config import RunConfig
from workflows.contracts import PublishInput, PublishOutput

STATE_BYTES = 30_000
SMALL = 60_000
"""Parameters of a policy."""


class Policy:
    """bfloat16 weights that a step of AdamW's size moves, with float32 ones behind them as DeepSpeed has them."""

    def __init__(self, parameters: int, *, learning_rate: float = 1e-6, dtype: torch.dtype = torch.bfloat16) -> None:
        self._rng = torch.Generator().manual_seed(0)
        self._rate, self._dtype = learning_rate, dtype
        self._master = (0.02 * torch.randn(parameters, generator=self._rng)).to(dtype).float()
        self._trend = torch.randn(parameters, generator=self._rng)
        self._first, self._second = torch.zeros(parameters), torch.zeros(parameters)
        self._steps = 0

    def step(self) -> None:
        gradient = 0.3 * self._trend + torch.randn(len(self._master), generator=self._rng)
        self._steps += 1
        self._first = 0.9 * self._first + 0.1 * gradient
        self._second = 0.95 * self._second + 0.05 * gradient**2
        first, second = self._first / (1 - 0.9**self._steps), self._second / (1 - 0.95**self._steps)
        self._master -= self._rate * first / (second.sqrt() + 1e-8)

    def tensors(self) -> dict[str, torch.Tensor]:
        half = len(self._master) // 2
        values = self._master.to(self._dtype)
        return {"embed": values[:half].clone(), "layer": values[half:].clone()}


@dataclass
class StubService:
    """Stands for TrainerService: the checkpoint that is asked for names the weights."""

    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    async def call(self, function: Callable[[Work], Any]) -> Any:
        return function(Work())

    def at(self, checkpoint: str, config: RunConfig, work: Work) -> Any:
        weights = self.states[checkpoint]
        infos = [
            TensorInfo(name=name, shape=list(value.shape), dtype=str(value.dtype).removeprefix("torch."))
            for name, value in sorted(weights.items())
        ]
        return SimpleNamespace(
            weights=weights,
            parameters=sum(value.numel() for value in weights.values()),
            dtype=next(iter(weights.values())).dtype,
            tensors=infos,
            world_size=1,
        )


def export(trainer: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(trainer.weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_text("a tokenizer\n" * 100)


def without_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`publish` exports what StubService gives it."""
    probe = Canary(token_ids=[1, 2], logprobs=[0.0, -1.0])
    monkeypatch.setattr(publication_activities, "export_folder", export)
    monkeypatch.setattr(publication_activities, "canary", lambda *_, **__: probe)
    monkeypatch.setattr(publication_activities, "known_vocabulary", lambda _: 3)


@dataclass
class Published:
    """A run that publishes given weights. A new worker on another machine is `moved()`."""

    run: str
    store: ObjectStore
    database: Engine
    folder: Path
    rules: dict[str, Any]
    service: StubService = field(default_factory=StubService)
    machine: int = 0

    def __post_init__(self) -> None:
        self.publishes = PublicationActivities(self.service, self.store, self.database, self.spool)  # type: ignore[arg-type]

    @property
    def spool(self) -> Path:
        return self.folder / f"machine{self.machine}" / "spool"

    def moved(self) -> None:
        self.machine += 1
        self.__post_init__()

    def trained(self, version: int, weights: dict[str, torch.Tensor]) -> str:
        """The training state of a version, as an update leaves it; its manifest's key."""
        key = training_state_key(self.run, version)
        self.service.states[key] = weights
        folder = self.folder / f"state{version}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.pt").write_bytes(version.to_bytes(2) * (STATE_BYTES // 2))
        files = upload_folder(self.store, objects_prefix(self.run), folder, progress=lambda _: None)
        state = Manifest(kind="training_state", run=self.run, version=version, step=version, files=files)
        write_manifest(self.store, key, state)
        return key

    async def again(self, version: int, *, repair: bool = False) -> PublishOutput:
        config = RunConfig.model_validate({"model": "tiny", "publication": self.rules}).model_dump(mode="json")
        key = training_state_key(self.run, version)
        message = PublishInput(run=self.run, config=config, version=version, step=version, checkpoint=key, again=repair)
        return await ActivityEnvironment().run(self.publishes.publish, message)

    async def publish(self, version: int, weights: dict[str, torch.Tensor]) -> Manifest:
        self.trained(version, weights)
        return read_manifest(self.store, (await self.again(version)).manifest)

    def loaded(self, version: int, *, engine: str = "local-e0", proven: bool = True, at: float | None = None) -> None:
        """The row that a load leaves."""
        when = float(version) if at is None else at
        with session(self.database) as opened:
            opened.merge(EngineLoad(run=self.run, version=version, engine=engine, proven=proven, loaded_at=when))

    def exported(self, version: int) -> Path:
        """The folder that a full set of the version consists of."""
        folder = self.folder / f"exported{version}"
        if not folder.exists():
            trainer = self.service.at(training_state_key(self.run, version), RunConfig(model="tiny"), Work())
            export(trainer, folder)
        return folder

    def objects(self) -> dict[str, int]:
        return dict(self.store.keys(f"{objects_prefix(self.run)}/"))

    def held_bytes(self) -> int:
        """All that the run has in the store."""
        return sum(size for _, size in self.store.keys(f"runs/{self.run}/"))

    def needed(self) -> set[str]:
        """Objects that the manifests need."""
        keys = [key for kind in ("weights", "state") for key, _ in self.store.keys(f"runs/{self.run}/{kind}/")]
        return {name for key in keys for name in read_manifest(self.store, key).objects}

    def versions(self) -> set[int]:
        """Those whose weights are in the store."""
        keys = [key for key, _ in self.store.keys(f"runs/{self.run}/weights/")]
        return {read_manifest(self.store, key).version for key in keys}


class Host:
    """An engine's machine."""

    def __init__(self, published: Published, name: str) -> None:
        self.published, self.name = published, name
        self.folder = published.folder / name
        self.cache = WeightsCache(published.store, self.folder)

    async def load(self, manifest: Manifest) -> int:
        """Fetch a version and see that it is what was exported, to the bit; the bytes that were moved."""
        expected = self.published.exported(manifest.version)
        async with self.cache.verified(manifest, expected) as (folder, moved):
            for path in expected.iterdir():
                assert (folder / path.name).read_bytes() == path.read_bytes(), f"version {manifest.version}"
            assert {path.name for path in folder.iterdir()} == {path.name for path in expected.iterdir()}
        return moved


async def chain(run: Published, versions: int, parameters: int = SMALL, **kind: Any) -> list[Manifest]:
    """Versions 0, 1, ... of a run, each proven by an engine before the next is published."""
    policy, manifests = Policy(parameters, **kind), []
    for version in range(versions):
        manifests.append(await run.publish(version, policy.tensors()))
        run.loaded(version)
        policy.step()
    return manifests


def damage(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 0x10
    store.put(key, bytes(data))
