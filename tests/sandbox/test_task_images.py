"""Images of tasks: built once per content, named by it, and clear about what they were built on or why they weren't."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.sandbox.daemon import Daemon
from activities.sandbox.machines.images import TaskImages
from tasksets.base import ImageSource
from tests.sandbox.conftest import docker
from tests.sandbox.machines import BASES
from workflows.errors import SandboxError

pytestmark = pytest.mark.docker
_numbers = itertools.count()


@pytest.fixture(scope="session")
async def daemon(docker_host: str) -> AsyncIterator[Daemon]:
    daemon = Daemon(docker_host)
    yield daemon
    await daemon.close()


@pytest.fixture
def images(daemon: Daemon, tmp_path: Path) -> TaskImages:
    return TaskImages(daemon, tmp_path / "state")


@pytest.fixture
def with_debian(daemon: Daemon, tmp_path: Path) -> TaskImages:
    BASES.mkdir(exist_ok=True)
    (tmp_path / "state").mkdir()
    (tmp_path / "state/bases").symlink_to(BASES)
    return TaskImages(daemon, tmp_path / "state", local_bases=True)


def source(tmp_path: Path, dockerfile: str, **changes: object) -> ImageSource:
    """A build context that no other test has."""
    folder = tmp_path / f"context-{next(_numbers)}"
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    (folder / "own").write_text(uuid.uuid4().hex)
    return ImageSource.model_validate({"context": str(folder), "timeout_s": 120} | changes)


async def test_an_image_is_built_once_per_content_whoever_asks(
    images: TaskImages, daemon: Daemon, docker_host: str, tmp_path: Path
) -> None:
    one = source(tmp_path, "FROM scratch\nCOPY own /own\nLABEL a=b\n")
    found = await asyncio.gather(*(images.ensure(one) for _ in range(3)))
    assert len({image.id for image in found}) == 1 and found[0].local_bases == ()
    before = docker(docker_host, "images", "-q", "--filter", "label=a=b")
    assert await TaskImages(daemon, tmp_path / "other").ensure(one) == found[0]
    assert docker(docker_host, "images", "-q", "--filter", "label=a=b") == before
    (Path(one.context) / "own").write_text("else")
    assert (await TaskImages(daemon, tmp_path / "other").ensure(one)).id != found[0].id


async def test_arguments_of_the_build_are_given_and_make_another_image(images: TaskImages, tmp_path: Path) -> None:
    one = source(tmp_path, "FROM scratch\nARG WHO=nobody\nLABEL who=$WHO\nCOPY own /own\n")
    plain = await images.ensure(one)
    named = await images.ensure(one.model_copy(update={"args": {"WHO": "someone"}}))
    assert plain.id != named.id


async def test_a_debian_made_here_stands_in_and_the_image_says_so(
    with_debian: TaskImages, daemon: Daemon, docker_host: str, tmp_path: Path
) -> None:
    one = source(tmp_path, "FROM ubuntu:24.04\nCOPY own /own\nRUN python3 -c 'import pytest' && python --version\n")
    image = await with_debian.ensure(one)
    assert image.local_bases == ("ubuntu:24.04",)
    assert docker(docker_host, "images", "-q", "ubuntu") == ""
    # Who does not ask for stand-ins finds what was built, and what it was built on.
    assert await TaskImages(daemon, tmp_path / "other").ensure(one) == image


async def test_a_step_that_fails_is_named_and_final(with_debian: TaskImages, tmp_path: Path) -> None:
    one = source(tmp_path, "FROM debian:bookworm\nCOPY own /own\nRUN apt-get install -y no-such-package\n")
    words = r"Step 3/\d : RUN apt-get install -y no-such-package: .* 100; .*E: Unable to locate package"
    with pytest.raises(SandboxError, match=words) as failed:
        await with_debian.ensure(one)
    assert not failed.value.retryable


async def test_a_build_ends_in_its_time(with_debian: TaskImages, tmp_path: Path) -> None:
    one = source(tmp_path, "FROM debian:bookworm\nCOPY own /own\nRUN sleep 60\n", timeout_s=3)
    with pytest.raises(SandboxError, match=r"Step 3/\d : RUN sleep 60: not done within 3 s") as failed:
        await with_debian.ensure(one)
    assert not failed.value.retryable


async def test_a_dockerfile_that_the_builder_cannot_read_is_final(images: TaskImages, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"(?i)nonsense") as failed:
        await images.ensure(source(tmp_path, "FROM scratch\nNONSENSE\n"))
    assert not failed.value.retryable
    missing = source(tmp_path, "FROM scratch\n").model_copy(update={"dockerfile": "nowhere"})
    with pytest.raises(SandboxError, match="nowhere can't be read"):
        await images.ensure(missing)


async def test_a_base_that_is_not_to_be_had_is_told_with_what_can_be_done(images: TaskImages, tmp_path: Path) -> None:
    known = source(tmp_path, "FROM localhost:1/debian:bookworm\nFROM debian:no-such-tag-of-ours\n")
    with pytest.raises(SandboxError, match=r"localhost:1/debian:bookworm is not on this machine .* `docker load` it"):
        await images.ensure(known)
    with pytest.raises(SandboxError, match=r"localhost:1/debian:bookworm could not be reached a moment ago"):
        await images.ensure(known)
    with pytest.raises(SandboxError, match=r"debian:no-such-tag-of-ours .*RATCHET_LOCAL_BASES=1"):
        await images.ensure(source(tmp_path, "FROM debian:no-such-tag-of-ours\n"))


async def test_a_ready_image_goes_before_its_dockerfile_and_the_dockerfile_stands_in_for_it(
    images: TaskImages, docker_host: str, tmp_path: Path
) -> None:
    one = source(tmp_path, "FROM scratch\nCOPY own /own\n")
    built = await images.ensure(one)
    docker(docker_host, "tag", built.id, "ratchet-test/ready:1")
    other = source(tmp_path, "FROM scratch\nCOPY own /own\n", reference="ratchet-test/ready:1")
    assert await images.ensure(other) == built
    nowhere = other.model_copy(update={"reference": "localhost:1/nothing:1"})
    assert (await images.ensure(nowhere)).id not in ("", built.id)
    with pytest.raises(SandboxError, match="localhost:1/nothing:1"):
        await images.ensure(ImageSource(reference="localhost:1/nothing:1"))
