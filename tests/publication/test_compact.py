"""Versions that are published as deltas: when, how large, and that they are what a full set is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from activities.publication import fetching
from activities.publication.fetching import fetch_version
from activities.publication.manifest import WEIGHTS_FILE, read_manifest, weights_key, write_manifest
from storage.database import session
from storage.objects import ObjectStore
from storage.tables import EngineLoad, Publication
from tests.publication.stub import SMALL, Host, Policy, Published, chain
from tests.training.worlds import World, Worlds, assert_equal, weights_of
from workflows.config import RunConfig, parse_run_config
from workflows.errors import StorageError

Runs = Callable[..., Published]


async def test_ten_deltas_at_a_learning_rate_of_1e_6_are_small_and_exact(published: Runs) -> None:
    run = published(full_every=11, keep_last=11)
    manifests = await chain(run, 11, parameters=1_000_000)
    weights = [manifest.weights_file for manifest in manifests]
    assert [len(file.deltas) for file in weights] == list(range(11))
    assert max(file.deltas[-1].bytes / file.bytes for file in weights[1:]) <= 0.02
    follower, late = Host(run, "follower"), Host(run, "late")
    moved = [await follower.load(manifest) for manifest in manifests]
    assert moved[0] == manifests[0].total_bytes
    others = sum(file.bytes for file in manifests[0].files if file.name != WEIGHTS_FILE)
    assert moved[1:] == [file.deltas[-1].bytes + others for file in weights[1:]]
    assert await late.load(manifests[10]) == sum(manifests[10].objects.values()), "the full set, and each delta once"


async def test_a_trainers_step_comes_as_a_delta_that_makes_its_weights(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = world(dtype="bfloat16", learning_rate=1e-6)
    config = RunConfig.model_validate(run.config | {"publication": {"full_every": 3}}).model_dump(mode="json")
    monkeypatch.setattr(World, "config", config)
    await run.publish(0, (await run.start()).checkpoint)
    with session(run.database) as opened:
        opened.add(EngineLoad(run=run.run, version=0, engine="local-e0", proven=True, loaded_at=1.0))
    run.reserve(1)
    manifest = read_manifest(run.store, (await run.publish(1, (await run.update(1)).checkpoint)).manifest)
    assert len(manifest.weights_file.deltas) == 1
    fetch_version(run.store, manifest, tmp_path / "v1", {})
    assert_equal(load_file(tmp_path / "v1" / WEIGHTS_FILE), weights_of(run))


async def test_the_digest_is_the_contents_whatever_way_it_comes(published: Runs) -> None:
    whole, compact = published(), published(full_every=4, keep_last=3)
    one, other = await chain(whole, 3), await chain(compact, 3)
    assert [item.digest for item in one] == [item.digest for item in other]
    assert not one[2].weights_file.deltas and other[2].weights_file.deltas
    assert [item.builds_on for item in other] == ["", *(weights_key(compact.run, version) for version in (0, 1))]


async def test_what_is_recorded_as_bytes_is_what_the_version_added(published: Runs) -> None:
    run = published(full_every=3, keep_last=9)
    manifests = await chain(run, 4)
    with session(run.database) as opened:
        rows = [opened.get(Publication, (run.run, version)) for version in range(4)]
    first, *weights = (manifest.weights_file for manifest in manifests)
    small = manifests[0].total_bytes - first.bytes
    added = [first.bytes + small, *(file.deltas[-1].bytes for file in weights[:2]), weights[2].bytes]
    assert [row.bytes for row in rows if row] == added
    parts = {"load", "export", "upload", "canary", "manifest", "total"}
    assert rows[0] is not None and parts <= rows[0].seconds.keys()
    assert rows[1] is not None and parts | {"delta"} <= rows[1].seconds.keys()


async def test_a_full_set_comes_every_few_versions_and_wherever_a_delta_has_no_ground(published: Runs) -> None:
    run, policy = published(full_every=3, keep_last=20), Policy(SMALL)

    async def deltas(version: int, *, proven: bool = True) -> int:
        policy.step()
        manifest = await run.publish(version, policy.tensors())
        if proven:
            run.loaded(version)
        return len(manifest.weights_file.deltas)

    assert [await deltas(version) for version in range(4)] == [0, 1, 2, 0]
    run.moved()
    assert await deltas(4) == 0, "another machine has no base"
    assert await deltas(5, proven=False) == 1
    assert await deltas(6) == 0, "no engine has shown that version 5 can be loaded"
    base = next((run.spool / "offers").iterdir())
    base.write_bytes(base.read_bytes()[:-1] + b"?")
    assert await deltas(7) == 0, "the base was damaged"
    run.store.delete([f"runs/{run.run}/weights/v000007/manifest.json"])
    assert await deltas(8) == 0, "the version before is gone"
    assert await deltas(9) == 1


async def test_weights_that_change_too_much_are_published_whole(published: Runs) -> None:
    run = published(full_every=5, keep_last=5)
    manifests = await chain(run, 3, learning_rate=1e-3, dtype=torch.float32)
    assert [len(item.weights_file.deltas) for item in manifests] == [0, 0, 0]
    assert run.objects().keys() == run.needed()


async def test_weights_of_another_shape_are_published_whole(published: Runs) -> None:
    run = published(full_every=5, keep_last=5)
    await chain(run, 2)
    assert not (await run.publish(2, Policy(SMALL + 64).tensors())).weights_file.deltas


async def test_weights_that_did_not_change_add_nothing(published: Runs) -> None:
    run = published(full_every=5, keep_last=9)
    manifests, weights = await chain(run, 2), run.service.states[f"runs/{run.run}/state/s000001/f0000/manifest.json"]
    again = await run.publish(2, weights)
    assert (again.digest, again.weights_file) == (manifests[1].digest, manifests[1].weights_file)
    assert again.builds_on == manifests[1].builds_on
    with session(run.database) as opened:
        row = opened.get(Publication, (run.run, 2))
    assert row is not None and row.bytes == 0


async def test_the_trainers_machine_keeps_one_base_and_none_where_no_delta_is_made(published: Runs) -> None:
    run = published(full_every=2)
    manifests = await chain(run, 3)
    assert [path.name for path in (run.spool / "offers").iterdir()] == [manifests[2].weights_file.sha256]
    other = published(folder=run.folder)
    await chain(other, 1)
    assert not list((run.spool / "offers").iterdir())
    assert not list((run.spool / "trainer").iterdir())


async def test_a_manifest_is_not_written_before_its_whole_chain_is_there(published: Runs) -> None:
    run = published(full_every=6, keep_last=9)
    last = (await chain(run, 3))[-1]
    for key in last.weights_file.objects:
        held = run.store.get(key)
        run.store.delete([key])
        with pytest.raises(StorageError, match="is not in the store"):
            write_manifest(run.store, "elsewhere/manifest.json", last)
        run.store.put(key, held)


async def test_the_trainers_machine_needs_room_for_the_delta_too(
    published: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = published(full_every=6), Policy(2_000_000).tensors()
    usage = type("Usage", (), {"free": 76_000_000})()
    run.trained(0, weights)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"77 MB are needed .* 76 MB are free") as caught:
        await run.again(0)
    assert caught.value.retryable


async def test_a_cap_holds_for_the_uploads_and_reaches_the_downloads_with_the_manifest(
    published: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published(full_every=6, max_mbytes_per_s=2.5, keep_last=9)
    caps: dict[str, set[int]] = {"put_file": set(), "get_file": set()}

    def spying(name: str) -> Callable[..., None]:
        real = getattr(run.store, name)

        def spy(*arguments: Any, max_bytes_per_s: int = 0, **how: Any) -> None:
            caps[name].add(max_bytes_per_s)
            real(*arguments, max_bytes_per_s=max_bytes_per_s, **how)

        return spy

    policy = Policy(SMALL)
    run.trained(0, policy.tensors())
    policy.step()
    run.trained(1, policy.tensors())
    for name in caps:
        monkeypatch.setattr(run.store, name, spying(name))
    first = await run.again(0)
    run.loaded(0)
    second = await run.again(1)
    for output in (first, second):
        await Host(run, "host").load(read_manifest(run.store, output.manifest))
    assert caps == {"put_file": {2_500_000}, "get_file": {2_500_000}}


def test_transfers_are_capped_by_the_client(tmp_path: Path) -> None:
    class Client:
        def __init__(self) -> None:
            self.caps: list[int | None] = []

        def upload_file(self, *_: object, Config: Any, **__: object) -> None:
            self.caps.append(Config.max_bandwidth)

        def download_file(self, _: str, __: str, path: str, *, Config: Any, **___: object) -> None:
            self.caps.append(Config.max_bandwidth)
            Path(path).touch()

    client = Client()
    store = ObjectStore(client, "test")  # type: ignore[arg-type]
    for cap in (0, 1000):
        store.put_file("key", tmp_path / "a", max_bytes_per_s=cap)
        store.get_file("key", tmp_path / "b", max_bytes_per_s=cap)
    assert client.caps == [None, None, 1000, 1000]


def test_a_run_that_was_started_before_deltas_publishes_whole_versions() -> None:
    config = RunConfig.model_validate({"model": "tiny", "publication": {"keep_last": 3}}).publication
    assert (config.full_every, config.keep_every, config.max_mbytes_per_s) == (1, 0, 0.0)
    with pytest.raises(ValueError, match=r"publication\.full_every"):
        parse_run_config({"model": "tiny", "publication": {"full_every": 0}})
