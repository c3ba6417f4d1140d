"""Weights on an engine's machine: from a base that is there or whole, verified, and with room or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from activities.publication import fetching
from activities.publication.delta import WrongDelta
from activities.publication.fetching import fetch_version
from activities.publication.manifest import WEIGHTS_FILE, read_manifest
from storage.objects import ObjectStore
from tests.publication.stub import Host, Published, chain, damage
from workflows.errors import StorageError

Runs = Callable[..., Published]


async def test_an_engine_that_lags_fetches_only_what_it_lacks(published: Runs) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host = await chain(run, 5), Host(run, "host")
    await host.load(manifests[1])
    deltas = manifests[4].weights_file.deltas
    small = sum(file.bytes for file in manifests[4].files if file.name != WEIGHTS_FILE)
    assert await host.load(manifests[4]) == sum(delta.bytes for delta in deltas[1:]) + small
    assert await host.load(manifests[4]) == 0, "it is here"


async def test_a_base_that_was_damaged_on_the_engines_machine_is_made_up_for_by_the_whole_chain(
    published: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host = await chain(run, 3), Host(run, "host")
    await host.load(manifests[1])
    path = host.folder / manifests[1].digest[:32] / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await host.load(manifests[2]) == sum(manifests[2].objects.values())
    assert "is not the base of" in caplog.text


async def test_a_delta_that_came_damaged_is_fetched_again_with_the_whole_chain(
    published: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host = await chain(run, 3), Host(run, "host")
    await host.load(manifests[1])
    get_file, key = run.store.get_file, manifests[2].weights_file.deltas[-1].key
    spoilt: list[str] = []

    def get_badly(name: str, path: Path, **how: Any) -> None:
        get_file(name, path, **how)
        if name == key and not spoilt:
            spoilt.append(name)
            path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(run.store, "get_file", get_badly)
    await host.load(manifests[2])
    assert spoilt


async def test_a_flipped_byte_in_a_delta_is_an_error_and_leaves_no_weights(published: Runs) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host, late = await chain(run, 3), Host(run, "host"), Host(run, "late")
    await host.load(manifests[1])
    damage(run.store, manifests[2].weights_file.deltas[-1].key)
    for where in (host, late):
        with pytest.raises(WrongDelta, match="sha256 differs from the manifest") as caught:
            await where.load(manifests[2])
        assert caught.value.retryable
        folder = where.folder / manifests[2].digest[:32]
        assert not list(folder.rglob("*.safetensors")) and not (folder / fetching.WORK).exists()
    await host.load(manifests[1])


async def test_a_flipped_byte_in_the_full_set_stops_only_those_who_need_it(published: Runs) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host, late = await chain(run, 2), Host(run, "host"), Host(run, "late")
    await host.load(manifests[0])
    damage(run.store, manifests[0].weights_file.key)
    await host.load(manifests[1])
    with pytest.raises(StorageError, match="sha256 differs from the manifest") as caught:
        await late.load(manifests[1])
    assert caught.value.retryable and not isinstance(caught.value, WrongDelta)


async def test_a_base_stays_while_a_load_uses_it(published: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines of the host load other versions meanwhile, which would push it out."""
    run = published(full_every=2, keep_last=9)
    manifests, host = await chain(run, 6), Host(run, "host")
    await host.load(manifests[0])
    get_file, begun, go_on = run.store.get_file, threading.Event(), threading.Event()

    def get_slowly(name: str, path: Path, **how: Any) -> None:
        if name == manifests[1].weights_file.deltas[-1].key:
            begun.set()
            assert go_on.wait(60)
        get_file(name, path, **how)

    monkeypatch.setattr(run.store, "get_file", get_slowly)
    load = asyncio.create_task(host.load(manifests[1]))
    assert await asyncio.to_thread(begun.wait, 60)
    for other in (manifests[2], manifests[4]):
        await host.load(other)
    go_on.set()
    assert await load < manifests[1].total_bytes, "from the base that was here"
    assert len(list(host.folder.iterdir())) == 2


async def test_a_load_that_nobody_waits_for_stops_before_another_begins(
    published: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published()
    (manifest,), host = await chain(run, 1), Host(run, "host")
    begun, ended, get_file = threading.Event(), threading.Event(), run.store.get_file

    def get_for_ever(name: str, path: Path, *, progress: Callable[[int], None], **_: Any) -> None:
        begun.set()
        try:
            while True:
                progress(1)
        finally:
            ended.set()

    monkeypatch.setattr(run.store, "get_file", get_for_ever)
    load = asyncio.create_task(host.load(manifest))
    assert await asyncio.to_thread(begun.wait, 60)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert ended.is_set()
    monkeypatch.setattr(run.store, "get_file", get_file)
    await host.load(manifest)


async def test_what_a_killed_process_left_in_a_folder_is_not_handed_to_an_engine(published: Runs) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host = await chain(run, 2), Host(run, "host")
    folder = host.folder / manifests[1].digest[:32]
    (folder / fetching.WORK).mkdir(parents=True)
    for name in ("other.safetensors", f"{WEIGHTS_FILE}.17.part", f"{fetching.WORK}/whole"):
        (folder / name).write_bytes(b"half")
    await host.load(manifests[1])


async def test_an_engines_full_disk_is_noticed_before_the_write_with_the_numbers(
    published: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published(full_every=6, keep_last=9)
    manifests, host = await chain(run, 3, parameters=2_000_000), Host(run, "host")
    usage = type("Usage", (), {"free": 69_000_000})()
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage)
    for manifest, megabytes in ((manifests[0], 71), (manifests[2], 75)):
        with pytest.raises(StorageError, match=rf"{megabytes} MB are needed at .* 69 MB are free: make room") as caught:
            await host.load(manifest)
        assert caught.value.retryable
        assert not list((host.folder / manifest.digest[:32]).iterdir())


def test_manifests_that_were_written_before_deltas_are_read(object_store: ObjectStore, tmp_path: Path) -> None:
    file = {"name": "a", "key": "before/a", "bytes": 5, "sha256": hashlib.sha256(b"12345").hexdigest()}
    written = {"kind": "weights", "run": "r", "version": 0, "step": 0, "world_size": 1, "files": [file], "tensors": []}
    written |= {"canary": None, "base": "", "batches": []}
    object_store.put("before/a", b"12345")
    object_store.put("before/manifest.json", json.dumps(written).encode())
    manifest = read_manifest(object_store, "before/manifest.json")
    assert (manifest.objects, manifest.builds_on, manifest.max_mbytes_per_s) == ({"before/a": 5}, "", 0.0)
    assert fetch_version(object_store, manifest, tmp_path / "a", {}) == 5
