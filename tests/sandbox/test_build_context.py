"""What a build gets: the same bytes and key for the same files, and the images that its Dockerfile names."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.channel import Result
from activities.sandbox.daemon import Daemon, Refused
from activities.sandbox.machines.bases import folder_of, stands_for
from activities.sandbox.machines.build import Progress
from activities.sandbox.machines.context import context_files, context_key, write_context
from activities.sandbox.machines.dockerfile import bases, with_bases
from activities.sandbox.machines.facts import facts_of
from activities.sandbox.machines.images import TaskImages
from tasksets.base import ImageSource
from workflows.errors import SandboxError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "src/deep").mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM debian\n")
    (folder / "src/a.txt").write_text("a")
    (folder / "src/deep/run.sh").write_text("#!/bin/sh\n")
    (folder / "src/deep/run.sh").chmod(0o755)
    (folder / "link").symlink_to("src/a.txt")
    return folder


def key(folder: Path) -> str:
    return context_key(folder, "Dockerfile", {})


def names(folder: Path) -> list[str]:
    return [name for name, _ in context_files(folder, "Dockerfile")]


def test_the_key_is_of_the_content_and_not_of_its_times(folder: Path) -> None:
    before = key(folder)
    os.utime(folder / "src/a.txt", (1, 1))
    assert key(folder) == before
    (folder / "src/a.txt").chmod(0o600)
    changed = key(folder)
    (folder / "src/a.txt").write_text("b")
    assert len({before, changed, key(folder)}) == 3
    assert context_key(folder, "Dockerfile", {"A": "1"}) != key(folder)
    (folder / "empty").mkdir()
    assert key(folder) not in (before, changed)


def test_the_archive_is_the_same_byte_for_byte_and_holds_the_given_dockerfile(folder: Path) -> None:
    first, second = io.BytesIO(), io.BytesIO()
    write_context(folder, "Dockerfile", "FROM other\n", first)
    os.utime(folder / "src/a.txt", (5, 5))
    write_context(folder, "Dockerfile", "FROM other\n", second)
    assert first.getvalue() == second.getvalue()
    with tarfile.open(fileobj=io.BytesIO(first.getvalue())) as tar:
        found = {entry.name: entry for entry in tar}
        assert found["link"].linkname == "src/a.txt" and found["src/deep/run.sh"].mode == 0o755
        dockerfile = tar.extractfile("Dockerfile")
        assert dockerfile is not None and dockerfile.read() == b"FROM other\n"


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("src", ["link"]),
        ("src/*.txt", ["link", "src", "src/deep", "src/deep/run.sh"]),
        ("**/*.sh", ["link", "src", "src/a.txt", "src/deep"]),
        ("*\n!src\n!src/deep\n", ["src", "src/a.txt", "src/deep", "src/deep/run.sh"]),
        ("# a comment\n\n/link\n", ["src", "src/a.txt", "src/deep", "src/deep/run.sh"]),
        ("l?nk", ["src", "src/a.txt", "src/deep", "src/deep/run.sh"]),
    ],
)
def test_what_dockerignore_names_stays_behind(folder: Path, ignore: str, left: list[str]) -> None:
    (folder / ".dockerignore").write_text(ignore)
    assert names(folder) == [".dockerignore", "Dockerfile", *left]


DOCKERFILE = """# syntax=docker/dockerfile:1
ARG VERSION=24.04
ARG "QUOTED"
FROM --platform=linux/amd64 ubuntu:${VERSION} AS build
RUN make
FROM python:3.13-slim
COPY --from=build /out /out
COPY --chown=1:1 --from=ghcr.io/org/tool:1 /bin/tool /bin/
COPY --from=0 /x /x
FROM build AS last
FROM scratch
"""


def test_the_images_that_a_dockerfile_builds_on_are_found() -> None:
    assert bases(DOCKERFILE, {}) == ["ubuntu:24.04", "python:3.13-slim", "ghcr.io/org/tool:1"]
    assert bases(DOCKERFILE, {"VERSION": "22.04"})[0] == "ubuntu:22.04"
    assert bases("from Debian\n", {}) == ["Debian"]


def test_other_images_are_put_in_their_place() -> None:
    text = with_bases(DOCKERFILE, {}, {"ubuntu:24.04": "mine:1", "ghcr.io/org/tool:1": "tool:2"}, {})
    assert "FROM --platform=linux/amd64 mine:1 AS build\n" in text and "FROM python:3.13-slim\n" in text
    assert "--from=tool:2 /bin/tool" in text and "syntax" not in text and "FROM build AS last" in text


@pytest.mark.parametrize(
    "name",
    [
        "debian:bookworm-slim",
        "ubuntu",
        "docker.io/library/python:3.13-slim-bookworm",
        "ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624",
        "ghcr.io/laude-institute/t-bench/python-3-13:20250620",
    ],
)
def test_a_debian_stands_for_well_known_names(name: str) -> None:
    assert stands_for(name)


@pytest.mark.parametrize("name", ["python:3.13-alpine", "node:22", "myorg/debian:1", "ghcr.io/org/ubuntu:1", "alpine"])
def test_and_for_no_other(name: str) -> None:
    assert not stands_for(name)


def test_what_stands_for_terminal_benchs_bases_works_where_they_do() -> None:
    """Their tasks write to /app and test what is there, and few of them say so."""
    name = "ghcr.io/laude-institute/t-bench/python-3-13:20250620"
    folders = {image: folder_of(image) for image in (name, "ubuntu:24.04")}
    text = f"FROM {name} AS one\nCOPY run.sh .\nFROM ubuntu:24.04\nCOPY --from={name} /a /a\n"
    changed = with_bases(text, {}, {name: "mine:1", "ubuntu:24.04": "mine:1"}, folders)
    assert changed == "FROM mine:1 AS one\nWORKDIR /app\nCOPY run.sh .\nFROM mine:1\nCOPY --from=mine:1 /a /a\n"


def test_a_step_that_fails_is_named_with_what_it_said() -> None:
    progress = Progress()
    for line in (
        b'{"stream":"Step 1/2 : FROM debian\\n"}',
        b'{"stream":" ---> abc\\n"}',
        b'{"stream":"Step 2/2 : RUN make\\n"}',
        b'{"stream":"make: no rule\\n"}',
        b"not json",
        b'{"errorDetail":{"code":2},"error":"The command returned a non-zero code: 2"}',
    ):
        progress.take(line)
    assert progress.words() == "Step 2/2 : RUN make: The command returned a non-zero code: 2; make: no rule"


async def test_a_dockerfile_that_leads_out_of_its_context_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "secret").write_text("FROM scratch\n")
    (tmp_path / "context/Dockerfile").symlink_to(tmp_path / "secret")
    images = TaskImages(Nothing(""), tmp_path)
    for dockerfile in ("Dockerfile", "../secret"):
        with pytest.raises(SandboxError, match="leads out of the build context") as failed:
            await images.ensure(ImageSource(context=str(tmp_path / "context"), dockerfile=dockerfile))
        assert not failed.value.retryable


class Nothing(Daemon):
    """A daemon that has no image."""

    async def call(self, verb: str, *_: Any, **__: Any) -> Any:
        raise Refused(f"{verb}: no such image", 404)


def test_a_listing_that_is_too_long_will_be_so_again() -> None:
    cut = Result(0, None, False, 0, 0.1, 2 << 20, b"x", b"")
    with pytest.raises(SandboxError, match="can't be listed") as failed:
        facts_of({}, cut)
    assert not failed.value.retryable
