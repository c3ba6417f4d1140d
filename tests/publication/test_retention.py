"""What stays of a run's weights and states, on real rows and a real store, while engines load at their own pace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from activities.publication import activities as publication_activities
from activities.publication import retention
from activities.publication.manifest import Manifest, objects_prefix, read_manifest, weights_key
from activities.publication.retention import versions_to_keep
from tests.publication.stub import STATE_BYTES, Host, Policy, Published

Runs = Callable[..., Published]
LOAD_TAKES = 3
"""Publications while the slow engine loads one version."""
SMALL_BYTES = 12_000
"""More than a version's manifests take, and all that does not change from one to the next."""


class Fleet:
    """Two engines that load version 0; then one loads each version at once, the other the newest when it is free."""

    def __init__(self, run: Published) -> None:
        self.run = run
        self.fast, self.slow = Host(run, "local-fast"), Host(run, "local-slow")
        self.serves: dict[str, Manifest] = {}
        self._loading: Manifest | None = None

    async def published(self, manifest: Manifest) -> None:
        await self._load(self.fast, manifest, now=manifest.version)
        if self._loading is None:
            await self._load(self.slow, manifest, now=manifest.version)
        elif manifest.version < self._loading.version + LOAD_TAKES:
            return
        else:
            # All this time it was in use, and only now it is fetched.
            await self._load(self.slow, self._loading, now=manifest.version)
        self._loading = manifest

    async def _load(self, host: Host, manifest: Manifest, *, now: int) -> None:
        await host.load(manifest)
        self.run.loaded(manifest.version, engine=host.name, at=float(now))
        self.serves[host.name] = manifest

    def served_is_there(self) -> bool:
        """Whether what the engines serve could be loaded on machines that have nothing."""
        there = self.run.objects().items() | dict(self.run.store.keys(f"runs/{self.run.run}/weights/")).items()
        keys = {key for key, _ in there}
        wanted = {weights_key(self.run.run, manifest.version) for manifest in self.serves.values()}
        return wanted <= keys and all(manifest.objects.items() <= there for manifest in self.serves.values())


@pytest.mark.parametrize(
    ("versions", "rules"),
    [(20, {}), (16, {"keep_every": 5}), (16, {"full_every": 5, "keep_every": 5})],
    ids=["full", "full, some for good", "deltas, some for good"],
)
async def test_many_versions_never_hold_more_than_allowed_and_nothing_in_use_goes(
    published: Runs, monkeypatch: pytest.MonkeyPatch, versions: int, rules: dict[str, int]
) -> None:
    """Twice and more what is kept at once; where some stay for good, as many as show three such and the next."""
    run, policy = published(keep_last=2, **rules), Policy(60_000)
    fleet = Fleet(run)
    before_removal: list[int] = []
    remove_old = publication_activities.remove_old

    def measured(*arguments: Any, **how: Any) -> Any:
        before_removal.append(run.held_bytes())
        return remove_old(*arguments, **how)

    monkeypatch.setattr(publication_activities, "remove_old", measured)
    full = 2 * 60_000 + 200
    pinned = 2 * LOAD_TAKES + 1  # From the version that the slow engine serves on, until it has loaded another.
    for_good = math.ceil(versions / rules["keep_every"]) if "keep_every" in rules else 0
    states = 3 * STATE_BYTES  # Two, and that of the next version while the oldest is still there.
    whole = pinned + for_good
    if every := rules.get("full_every"):
        # Whole ones at the chains' starts, one more that the oldest is made from, and deltas of 3 % at most.
        whole = math.ceil(pinned / every) + 1 + for_good
    allowed = states + whole * full + (pinned + for_good * (every or 1)) * (0.03 * full * bool(every) + SMALL_BYTES)
    for version in range(versions):
        manifest = await run.publish(version, policy.tensors())
        policy.step()
        assert run.held_bytes() <= allowed, version
        assert run.objects().keys() == run.needed(), "no object that nothing needs"
        await fleet.published(manifest)
        assert fleet.served_is_there(), version
    assert max(before_removal) <= allowed + full + SMALL_BYTES
    assert fleet.serves[fleet.slow.name].version < versions - 1
    if "keep_every" in rules:
        assert run.versions() >= {0, 5, 10, 15}
        for version in (0, 5, 10, 15):
            await Host(run, f"later-v{version}").load(read_manifest(run.store, weights_key(run.run, version)))
    else:
        assert len(run.versions()) <= pinned
    for name, manifest in fleet.serves.items():
        await Host(run, f"{name}-restarted").load(manifest)


async def test_versions_stay_until_a_newer_one_is_proven(published: Runs) -> None:
    """Also where no engine has a row at all, and where the one that has proven something failed since."""
    run, policy = published(keep_last=1), Policy(1000)

    async def publish(version: int) -> set[int]:
        policy.step()
        await run.publish(version, policy.tensors())
        return run.versions()

    assert [await publish(version) for version in range(3)] == [{0}, {0, 1}, {0, 1, 2}]
    run.loaded(1)
    assert await publish(3) == {1, 2, 3}
    run.loaded(3, proven=False)
    assert await publish(4) == {1, 3, 4} | {2}
    run.loaded(4)
    assert await publish(5) == {4, 5}


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> int:
    """Engines lag less than they may, so that fewer versions show what follows."""
    monkeypatch.setattr(retention, "IN_USE_REACH", 3)
    return 3


async def test_the_last_version_that_was_proven_outlives_any_number_that_were_not(published: Runs, reach: int) -> None:
    run, policy = published(keep_last=1), Policy(1000)
    for version in range(reach + 5):
        await run.publish(version, policy.tensors())
        policy.step()
        if version == 1:
            run.loaded(version)
    newest = reach + 4
    assert run.versions() == {1, *range(newest - reach, newest + 1)}


async def test_weights_that_an_open_episode_or_an_evaluation_plays_with_stay_as_its_engine_serves_them(
    published: Runs, reach: int
) -> None:
    """While they are open they have no rows: the engine that plays them is what refers to the version."""
    run, policy = published(keep_last=1, full_every=4), Policy(20_000)
    manifests = []
    for version in range(reach + 6):
        manifests.append(await run.publish(version, policy.tensors()))
        policy.step()
        run.loaded(version, engine="local-e0")
        if version == 2:
            run.loaded(version, engine="local-plays")
    assert 2 in run.versions()
    await Host(run, "fresh").load(manifests[2])
    run.loaded(len(manifests) - 1, engine="local-plays")
    await run.publish(len(manifests), policy.tensors())
    assert 2 not in run.versions()


async def test_states_go_with_the_newest_versions_and_not_with_what_engines_serve(published: Runs) -> None:
    run, policy = published(keep_last=2, keep_every=3), Policy(1000)
    for version in range(5):
        await run.publish(version, policy.tensors())
        policy.step()
        run.loaded(version if version != 1 else 0)
    states = {key.split("/")[-3] for key, _ in run.store.keys(f"runs/{run.run}/state/")}
    assert states == {"s000003", "s000004"}
    assert run.versions() == {0, 3, 4}


def test_an_engine_pins_what_it_serves_and_what_it_may_still_load() -> None:
    def kept(versions: int, serves: list[int], loaded: list[int] | None = None, last: int = 2) -> set[int]:
        return versions_to_keep(
            range(versions), serves=serves, loaded=serves if loaded is None else loaded, keep_last=last
        )

    assert kept(6, [5]) == {4, 5}
    assert kept(6, [3]) == {3, 4, 5}
    assert kept(6, [1, 5], [4, 5]) == {1, 4, 5}, "it serves 1, failed with 4 and will not go back"
    assert kept(100, [0, 99]) == {0, *range(91, 100)}, "what it may load is bounded, what it serves stays"
    assert kept(100, []) == set(range(91, 100))
    assert kept(3, [7]) == {1, 2}, "what engines serve came to them by another way"
    assert kept(0, []) == set()
    every = versions_to_keep(range(25), serves=[24], loaded=[24], keep_last=1, keep_every=10)
    assert every == {0, 10, 20, 24}


async def test_unfinished_uploads_of_killed_tries_are_aborted_but_not_those_of_others(published: Runs) -> None:
    run, policy = published(), Policy(1000)
    key = f"{objects_prefix(run.run)}/{'1' * 64}"
    client: Any = run.store._client
    others = f"{objects_prefix(run.run + 'x')}/{'2' * 64}"
    for name in (key, others):
        client.create_multipart_upload(Bucket=run.store.bucket, Key=name)
    await run.publish(0, policy.tensors())
    assert not run.store.uploads(f"{objects_prefix(run.run)}/")
    assert [upload.key for upload in run.store.uploads(f"{objects_prefix(run.run + 'x')}/")] == [others]
    run.store.abort_uploads(others)


async def test_an_unreadable_manifest_that_stays_keeps_all_objects(published: Runs) -> None:
    run, policy = published(keep_last=2), Policy(1000)
    await run.publish(0, policy.tensors())
    run.loaded(0)
    run.store.put(weights_key(run.run, 0), b"{}")
    before = run.objects().keys()
    policy.step()
    await run.publish(1, policy.tensors())
    assert run.objects().keys() > before, "and the run goes on"
