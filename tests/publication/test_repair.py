"""Objects that are damaged where they lie are replaced from the training state, and the report names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from activities.publication.manifest import WEIGHTS_FILE, Manifest, read_manifest, weights_key, write_manifest
from storage.database import session
from storage.objects import ObjectStore
from storage.report.weight_parts import WeightTroublePart
from storage.report.weights import weight_troubles
from tests.publication.stub import Host, Policy, Published, chain, damage
from workflows.errors import StorageError, TrainerError

Runs = Callable[..., Published]


def lose(store: ObjectStore, key: str) -> None:
    store.delete([key])


def trouble_of(run: Published, version: int) -> WeightTroublePart:
    with session(run.database) as opened:
        found = weight_troubles(opened, run.run, over=False)
    (trouble,) = [item for item in found if (item.version, item.engine) == (version, "")]
    return trouble


def told(run: Published, manifest: Manifest) -> Manifest:
    """The manifest as it is now."""
    return read_manifest(run.store, f"runs/{run.run}/weights/v{manifest.version:06d}/manifest.json")


@pytest.mark.parametrize("hurt", [damage, lose])
@pytest.mark.parametrize("name", [WEIGHTS_FILE, "config.json"])
async def test_a_damaged_object_is_replaced_by_what_was_published(
    published: Runs, hurt: Callable[[ObjectStore, str], None], name: str
) -> None:
    run = published(keep_last=9)
    (manifest,) = await chain(run, 1)
    key = next(file.key for file in manifest.files if file.name == name)
    hurt(run.store, key)
    with pytest.raises(StorageError):
        await Host(run, "before").load(manifest)
    await run.again(0)
    with pytest.raises(StorageError):
        await Host(run, "asked as ever").load(manifest)
    await run.again(0, repair=True)
    assert told(run, manifest) == manifest
    await Host(run, "after").load(manifest)
    trouble = trouble_of(run, 0)
    assert (trouble.what, trouble.settled) == (f"repair: {key} damaged in the object store", True)


@pytest.mark.parametrize("part", ["canary", "tensors"])
async def test_a_manifest_that_reads_well_and_says_what_is_not_true_of_its_weights_is_written_again(
    published: Runs, part: str
) -> None:
    run = published(keep_last=9)
    (manifest,) = await chain(run, 1)
    assert manifest.canary is not None
    logprobs = [*manifest.canary.logprobs[:-1], manifest.canary.logprobs[-1] - 1.0]
    wrong = {
        "canary": manifest.canary.model_copy(update={"logprobs": logprobs}),
        "tensors": [item.model_copy(update={"checksum": "0" * 16}) for item in manifest.tensors],
    }
    key = weights_key(run.run, 0)
    write_manifest(run.store, key, manifest.model_copy(update={part: wrong[part]}))
    await run.again(0, repair=True)
    assert told(run, manifest) == manifest
    assert trouble_of(run, 0).what == f"repair: checksums or canary in {key} damaged in the object store"


async def test_a_version_of_which_a_delta_is_damaged_becomes_whole_and_the_next_one_builds_upon_it(
    published: Runs,
) -> None:
    run, policy = published(full_every=9, keep_last=9), Policy(60_000)
    for version in range(3):
        await run.publish(version, policy.tensors())
        run.loaded(version)
        policy.step()
    manifest = read_manifest(run.store, (await run.again(2)).manifest)
    assert len(manifest.weights_file.deltas) == 2
    damage(run.store, manifest.weights_file.deltas[0].key)
    await run.again(2, repair=True)
    whole = told(run, manifest)
    assert (whole.digest, whole.weights_file.deltas, whole.builds_on) == (manifest.digest, [], "")
    assert whole.weights_file.key.endswith(whole.weights_file.sha256)
    await Host(run, "after").load(whole)
    following = await run.publish(3, policy.tensors())
    assert [delta.base_sha256 for delta in following.weights_file.deltas] == [whole.weights_file.sha256]
    await Host(run, "late").load(following)


async def test_whole_objects_are_left_as_they_are(published: Runs) -> None:
    run = published(full_every=9, keep_last=9)
    manifests, before = await chain(run, 2), run.objects()
    await run.again(1, repair=True)
    assert told(run, manifests[1]) == manifests[1] and run.objects() == before
    with session(run.database) as opened:
        assert weight_troubles(opened, run.run, over=False) == []


def garble(store: ObjectStore, key: str) -> None:
    store.put(key, store.get(key)[:-1] + b"!")


def falsify(store: ObjectStore, key: str) -> None:
    """One character of a digest."""
    before, field, after = store.get(key).partition(b'"sha256":"')
    store.put(key, before + field + (b"0" if after[:1] != b"0" else b"1") + after[1:])


@pytest.mark.parametrize("hurt", [garble, falsify, lose])
async def test_a_manifest_that_is_not_what_was_published_is_written_again(
    published: Runs, hurt: Callable[[ObjectStore, str], None]
) -> None:
    run = published(full_every=9, keep_last=9)
    manifests = await chain(run, 2)
    key = weights_key(run.run, 1)
    hurt(run.store, key)
    await run.again(1, repair=True)
    again = told(run, manifests[1])
    assert again.digest == manifests[1].digest
    await Host(run, "after").load(again)
    trouble = trouble_of(run, 1)
    assert trouble.what == f"check: {key} is damaged in the object store, or missing" and trouble.settled


async def test_a_manifest_that_cannot_be_read_is_not_written_for_other_weights(published: Runs) -> None:
    run = published(keep_last=9)
    await chain(run, 1)
    key = weights_key(run.run, 0)
    garble(run.store, key)
    run.trained(0, {name: tensor + 1 for name, tensor in Policy(60_000).tensors().items()})
    with pytest.raises(TrainerError, match="gives other weights here than were published as version 0"):
        await run.again(0, repair=True)
    with pytest.raises(StorageError, match="not a manifest"):
        read_manifest(run.store, key)


@pytest.mark.parametrize("hurt", [garble, lose])
async def test_a_run_goes_on_after_a_manifest_that_cannot_be_read(
    published: Runs, hurt: Callable[[ObjectStore, str], None]
) -> None:
    run, policy = published(full_every=9, keep_last=2), Policy(60_000)
    for version in range(5):
        manifest = await run.publish(version, policy.tensors())
        run.loaded(version)
        policy.step()
        if version == 1:
            before = set(run.objects())
            hurt(run.store, weights_key(run.run, version))
        if version == 2 and hurt is garble:
            assert before <= set(run.objects()), "nothing goes of what nobody knows to be needed"
    assert len(manifest.weights_file.deltas) == 2, "version 2 was whole"
    assert set(run.objects()) == run.needed()
    await Host(run, "after").load(manifest)


async def test_a_version_upon_what_the_store_has_lost_goes_whole(published: Runs) -> None:
    run, policy = published(full_every=9, keep_last=9), Policy(60_000)
    first = await run.publish(0, policy.tensors())
    run.loaded(0)
    lose(run.store, first.weights_file.key)
    policy.step()
    second = await run.publish(1, policy.tensors())
    assert not second.weights_file.deltas
    await Host(run, "after").load(second)


async def test_a_state_that_gives_other_weights_repairs_nothing_and_names_the_version_as_lost(
    published: Runs, database: Engine
) -> None:
    run = published(keep_last=9)
    (manifest,) = await chain(run, 1)
    other = Policy(60_000)
    other.step()
    run.trained(0, {name: tensor + 1 for name, tensor in other.tensors().items()})
    damage(run.store, manifest.weights_file.key)
    with pytest.raises(TrainerError, match="gives other weights here than were published as version 0") as caught:
        await run.again(0, repair=True)
    assert not caught.value.retryable
    what = trouble_of(run, 0).what
    assert what.startswith(f"repair: {manifest.weights_file.key} damaged in the object store; ")
    assert "gives other weights here than were published as version 0" in what
