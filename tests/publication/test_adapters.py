"""Versions that are published by their adapter: what is sent, that it makes the version to the bit, and when not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from temporalio.testing import ActivityEnvironment

from activities.generation.weights import WeightsCache
from activities.publication import activities as publication_activities
from activities.publication import adapters, sending
from activities.publication.activities import PublicationActivities
from activities.publication.adapters import DOWN, PREFIX, TENSORS_FILE, UP, apply_adapter, merged
from activities.publication.delta import WrongDelta
from activities.publication.manifest import WEIGHTS_FILE, Manifest, read_manifest
from storage.database import session
from storage.objects import ObjectStore, sha256_file
from storage.tables import EngineLoad, Publication
from tests.publication.stub import damage
from tests.training.worlds import World, Worlds, assert_equal, weights_of
from workflows.config import RunConfig
from workflows.contracts import PublishInput
from workflows.errors import StorageError

RULES = {"full_every": 2, "keep_last": 1}


@dataclass
class Tuned:
    """A run that trains an adapter of a real trainer, and one engine's machine that takes what it publishes."""

    world: World
    folder: Path
    checkpoints: list[str] = field(default_factory=list)

    def host(self, name: str = "host") -> WeightsCache:
        return WeightsCache(self.world.store, self.folder / name)

    async def publish(self, version: int, *, proven: bool = True) -> Manifest:
        """The next version; `proven`: by an engine, afterwards."""
        world = self.world
        if version:
            world.reserve(version)
            self.checkpoints.append((await world.update(version)).checkpoint)
        else:
            self.checkpoints.append((await world.start()).checkpoint)
        manifest = read_manifest(world.store, (await world.publish(version, self.checkpoints[version])).manifest)
        if proven:
            self.proven(version)
        return manifest

    async def repair(self, manifest: Manifest) -> Manifest:
        """The version as it is once no engine could load it and it was published again."""
        world, version = self.world, manifest.version
        checkpoint = self.checkpoints[version]
        message = PublishInput(
            run=world.run, config=world.config, version=version, step=version, checkpoint=checkpoint, again=True
        )
        out = await ActivityEnvironment().run(world.publishes.publish, message)
        return read_manifest(world.store, out.manifest)

    def proven(self, version: int) -> None:
        with session(self.world.database) as opened:
            row = EngineLoad(run=self.world.run, version=version, engine="local-e0", proven=True, loaded_at=version)
            opened.merge(row)

    async def load(self, host: WeightsCache, manifest: Manifest) -> int:
        """Fetch a version there and see that it is the trainer's, to the bit; the bytes that were moved."""
        async with host.verified(manifest, self.world.policy) as (folder, moved):
            assert sha256_file(folder / WEIGHTS_FILE) == manifest.weights_file.sha256
            assert_equal(load_file(folder / WEIGHTS_FILE), weights_of(self.world))
        return moved

    def recorded_bytes(self, version: int) -> int:
        with session(self.world.database) as opened:
            row = opened.get(Publication, (self.world.run, version))
            assert row is not None
            return row.bytes


@pytest.fixture
def tuned(world: Worlds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Tuned]:
    run = world(lora_rank=2, lora_alpha=3, lora_targets=["q_proj", "up_proj"], dtype="bfloat16")
    config = RunConfig.model_validate(run.config | {"publication": RULES}).model_dump(mode="json")
    monkeypatch.setattr(World, "config", config)
    yield Tuned(run, tmp_path / "hosts")


def of(manifest: Manifest, name: str) -> Any:
    return next(file for file in manifest.files if file.name == name)


def by_adapter(manifest: Manifest) -> bool:
    """Not by its whole weights, and not by what changed in them."""
    assert len(manifest.weights_file.deltas) <= 1
    return [delta.sha256 for delta in manifest.weights_file.deltas] == [of(manifest, TENSORS_FILE).sha256]


async def test_after_the_first_version_only_the_adapter_travels(tuned: Tuned) -> None:
    host, manifests = tuned.host(), []
    for version in range(4):
        manifests.append(await tuned.publish(version))
        moved = await tuned.load(host, manifests[-1])
        adapter, files = of(manifests[-1], TENSORS_FILE), manifests[-1].files
        small = sum(file.bytes for file in files if file.name not in (WEIGHTS_FILE, TENSORS_FILE))
        assert by_adapter(manifests[-1]) == (version > 0)
        if version:
            assert (moved, tuned.recorded_bytes(version)) == (adapter.bytes + small, adapter.bytes)
        if version == 3:
            late = adapter.bytes + small + manifests[0].weights_file.bytes
            assert await tuned.load(tuned.host("late"), manifests[3]) == late
    assert adapter.bytes < manifests[0].weights_file.bytes / 10
    digests = {manifest.weights_file.sha256 for manifest in manifests}
    assert len(digests) == 4, "each is another one"


async def test_the_weights_below_all_adapters_outlive_the_version_that_they_were(tuned: Tuned) -> None:
    for version in range(4):
        manifest = await tuned.publish(version)
    store, run = tuned.world.store, tuned.world.run
    kept = {read_manifest(store, key).version for key, _ in store.keys(f"runs/{run}/weights/")}
    assert 0 not in kept
    assert {key for key, _ in store.keys(f"runs/{run}/objects/")} >= manifest.objects.keys()
    assert await tuned.load(tuned.host(), manifest) > manifest.weights_file.bytes


async def test_a_trainer_on_another_machine_fetches_them(tuned: Tuned) -> None:
    await tuned.publish(0)
    world = tuned.world
    world.publishes = PublicationActivities(world.service, world.store, world.database, tuned.folder / "spool")
    assert by_adapter(await tuned.publish(1))
    offers = tuned.folder / "spool" / "offers"
    base = next(offers.iterdir())
    assert by_adapter(await tuned.publish(2)) and [*offers.iterdir()] == [base], "they stay for the next"
    base.write_bytes(base.read_bytes()[:-1] + b"!")
    assert not by_adapter(await tuned.publish(3)), "what is damaged is not built upon"
    assert by_adapter(await tuned.publish(4))


@pytest.mark.parametrize(
    ("part", "elsewhere"),
    [("listed_folder", False), ("builds_on", True), ("write_manifest", False), ("remove_old", True)],
)
async def test_a_publisher_that_is_killed_sends_the_adapter_at_the_next_try(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, part: str, elsewhere: bool
) -> None:
    host, world = tuned.host(), tuned.world
    await tuned.load(host, await tuned.publish(0))

    class Killed(BaseException):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(publication_activities, part, dies)
        await tuned.publish(1)
    if elsewhere:
        world.publishes = PublicationActivities(world.service, world.store, world.database, tuned.folder / "spool")
    manifest = read_manifest(world.store, (await world.publish(1, tuned.checkpoints[1])).manifest)
    tuned.proven(1)
    assert by_adapter(manifest)
    assert await tuned.load(host, manifest) < manifest.weights_file.bytes
    late = await tuned.publish(2)
    assert by_adapter(late) and late.adapter_base == manifest.adapter_base
    assert await tuned.load(tuned.host("late"), late) > late.weights_file.bytes


async def test_weights_that_no_engine_has_proven_are_not_built_upon(tuned: Tuned) -> None:
    await tuned.publish(0, proven=False)
    assert not by_adapter(await tuned.publish(1, proven=False))
    tuned.proven(0)
    assert by_adapter(await tuned.publish(2))


async def test_what_the_adapter_does_not_make_goes_whole(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tuned.host()
    await tuned.load(host, await tuned.publish(0))

    def otherwise(*_: object, **__: object) -> None:
        raise WrongDelta("it makes something else")

    with monkeypatch.context() as patched:
        patched.setattr(sending, "apply_adapter", otherwise)
        manifest = await tuned.publish(1)
    assert not by_adapter(manifest)
    assert await tuned.load(host, manifest) > 0
    monkeypatch.setattr(sending, "LARGEST_SHARE", 1e-9)
    assert not by_adapter(await tuned.publish(2)), "an adapter as large as the weights saves nothing"


async def test_a_host_whose_base_is_damaged_fetches_it_again(tuned: Tuned) -> None:
    host, first = tuned.host(), await tuned.publish(0)
    await tuned.load(host, first)
    base = tuned.folder / "host" / first.digest[:32] / WEIGHTS_FILE
    base.write_bytes(base.read_bytes()[:-1] + b"!")
    second = await tuned.publish(1)
    assert await tuned.load(host, second) > first.weights_file.bytes
    assert not base.exists()
    third = await tuned.publish(2)
    assert await tuned.load(host, third) > first.weights_file.bytes and base.exists()
    assert await tuned.load(host, await tuned.publish(3)) < first.weights_file.bytes


@pytest.mark.parametrize("hurt", [TENSORS_FILE, WEIGHTS_FILE, ""])
async def test_a_version_that_no_engine_could_load_is_sent_whole_from_the_training_state(
    tuned: Tuned, hurt: str
) -> None:
    """Damaged is its adapter, its base, or nothing: then hosts add otherwise than the trainer's machine."""
    world = tuned.world
    await tuned.publish(0)
    manifest = await tuned.publish(1)
    if hurt:
        damage(world.store, of(manifest, hurt).key)
    repaired = await tuned.repair(manifest)
    assert not repaired.weights_file.deltas and repaired.digest == manifest.digest
    assert await tuned.load(tuned.host(), repaired) == repaired.total_bytes


async def test_a_base_that_is_damaged_in_the_store_is_laid_upon_no_more(tuned: Tuned) -> None:
    world = tuned.world
    first = await tuned.publish(0)
    manifest = await tuned.publish(1)
    damage(world.store, first.weights_file.key)
    await tuned.repair(manifest)
    later = await tuned.publish(2)
    assert not by_adapter(later)
    assert await tuned.load(tuned.host(), later) > 0, "a host that has nothing yet"


async def test_a_base_that_the_store_has_lost_is_sent_again(tuned: Tuned) -> None:
    first = await tuned.publish(0)
    tuned.world.store.delete([first.weights_file.key])
    second = await tuned.publish(1)
    assert by_adapter(second)
    assert await tuned.load(tuned.host(), second) > first.weights_file.bytes


async def test_engines_of_one_host_share_a_base_also_where_one_of_them_gives_up_fetching_it(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await tuned.publish(0), await tuned.publish(1)
    host, store, begun = tuned.host(), tuned.world.store, threading.Event()
    whole, fetched = type(store).get_file, []

    def slow(self: ObjectStore, key: str, path: Path, **how: Any) -> None:
        if key == first.weights_file.key:
            fetched.append(key)
            if not begun.is_set():
                begun.set()
                while True:
                    time.sleep(0.01)
                    how["progress"](0)
        whole(self, key, path, **how)

    monkeypatch.setattr(type(store), "get_file", slow)
    one = asyncio.create_task(tuned.load(host, second))
    await asyncio.to_thread(begun.wait)
    others = [asyncio.create_task(tuned.load(host, second)) for _ in range(2)]
    await asyncio.sleep(0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    moved = await asyncio.gather(*others)
    assert sum(moved) < 2 * first.weights_file.bytes
    assert len(fetched) == 2, "once in vain, once for both"


async def test_what_a_killed_worker_left_beside_the_base_goes(tuned: Tuned) -> None:
    first, second = await tuned.publish(0), await tuned.publish(1)
    folder = tuned.folder / "host" / first.digest[:32]
    folder.mkdir(parents=True)
    (folder / f"{WEIGHTS_FILE}.77.part.aB3").write_bytes(b"half of it")
    await tuned.load(tuned.host(), second)
    assert [item.name for item in folder.iterdir()] == [WEIGHTS_FILE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapters_weights_are_the_same_bits_whatever_is_computed_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight_OI = torch.randn(70, 33, generator=generator).to(dtype)
    a_RI, b_OR = torch.randn(5, 33, generator=generator).to(dtype), torch.randn(70, 5, generator=generator).to(dtype)
    made = merged(weight_OI, a_RI, b_OR, 1.5)
    exact = weight_OI.double() + 1.5 * (b_OR.double() @ a_RI.double())
    assert made.dtype == dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-8 * float(exact.abs().max())}[dtype]
    assert float((made.double() - exact).abs().max()) <= bound
    for at_once in (1, 33, 200, 1 << 20):
        monkeypatch.setattr(adapters, "AT_ONCE", at_once)
        assert torch.equal(merged(weight_OI, a_RI, b_OR, 1.5), made)
    if dtype is torch.bfloat16:
        assert torch.equal(exact.to(dtype), made)
        return
    one_by_one = [
        [one(weight_OI[row, column], a_RI[:, column], b_OR[row]) for column in range(33)] for row in range(70)
    ]
    assert torch.equal(torch.tensor(one_by_one), made), "as the definition says, an element at a time"


def one(weight: torch.Tensor, a_R: torch.Tensor, b_R: torch.Tensor) -> float:
    """By numpy's float32: rounded after each product and each sum."""
    import numpy as np

    total = np.float32(b_R[0].item()) * np.float32(a_R[0].item())
    for rank in range(1, len(a_R)):
        total = total + np.float32(b_R[rank].item()) * np.float32(a_R[rank].item())
    return float(np.float32(weight.item()) + np.float32(1.5) * total)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """(weights, an adapter on them)."""
    save_file({"layer.weight": torch.ones(6, 4), "embed": torch.ones(3)}, tmp_path / "base")
    pair = {f"{PREFIX}layer{DOWN}": torch.ones(2, 4), f"{PREFIX}layer{UP}": torch.ones(6, 2)}
    save_file(pair, tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"other" + DOWN: (2, 4), "other" + UP: (6, 2)}, "does not fit"),
        ({"layer" + DOWN: (2, 5), "layer" + UP: (6, 2)}, "does not fit"),
        ({"layer" + DOWN: (2, 4)}, "does not fit"),
        ({"layer" + DOWN: (2, 4), "layer" + UP: (6, 3)}, "has 2 ranks, its other half 3"),
        ({"embed" + DOWN: (1, 3), "embed" + UP: (1, 1)}, "does not fit"),
        (None, "not an adapter in safetensors"),
        ({"layer" + DOWN: (2, 4), "layer" + UP: (6, 2)}, "makes a file whose sha256 is"),
    ],
)
def test_an_adapter_that_is_not_the_weights_own_makes_nothing(
    files: tuple[Path, Path], parts: dict[str, tuple[int, int]] | None, why: str
) -> None:
    base, adapter = files
    if parts is None:
        adapter.write_bytes(b"\x01\x02" * 40)
    else:
        save_file({PREFIX + name: torch.ones(shape) for name, shape in parts.items()}, adapter)
    result, before = base.with_name("result"), base.read_bytes()
    with pytest.raises(WrongDelta, match=why):
        apply_adapter(base, adapter, result, scale=2.0, base_sha256=sha256_file(base), sha256="0" * 64)
    assert base.read_bytes() == before
    assert sorted(item.name for item in base.parent.iterdir()) == ["adapter", "base"]


def test_an_adapter_upon_other_weights_makes_nothing(files: tuple[Path, Path]) -> None:
    base, adapter = files
    with pytest.raises(WrongDelta, match="is not the base of adapter"):
        apply_adapter(base, adapter, base.with_name("result"), scale=2.0, base_sha256="0" * 64, sha256="0" * 64)


def test_whoever_is_told_to_stop_hears_so_and_nothing_is_left(files: tuple[Path, Path]) -> None:
    base, adapter = files
    calls = []

    def progress(count: int) -> None:
        calls.append(count)
        if len(calls) == 2:
            raise StorageError("nobody waits any more")

    with pytest.raises(StorageError, match="nobody waits any more"):
        apply_adapter(
            base,
            adapter,
            base.with_name("result"),
            scale=2.0,
            base_sha256=sha256_file(base),
            sha256="0" * 64,
            progress=progress,
        )
    assert sorted(item.name for item in base.parent.iterdir()) == ["adapter", "base"]
