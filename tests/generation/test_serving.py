from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from activities.generation.proof import Desired
from activities.generation.server import EngineSpec, pid_path, read_spec, spec_path
from activities.generation.serving import end_server, serve
from tests.generation.fakes import FakeEngine
from workflows.contracts import ApplyInput
from workflows.errors import EngineError

SPEC = EngineSpec(model="/m", context_length=64, dtype="float32")
OTHER = EngineSpec(model="/other", context_length=64, dtype="float32")
Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "engines").mkdir()
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def launch(home: Path) -> Iterator[Launch]:
    """A process that looks like the engine's launcher, and its pid file."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", "import time; time.sleep(60)", *words]
        process = subprocess.Popen(argv)
        started.append(process)
        # Until the child is its own program, its command line is this one's.
        while words and words[-1].encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        pid_path(home, "local-e0").write_text(f"{process.pid}\n")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


async def test_an_engine_that_serves_the_spec_is_left_alone(home: Path, launch: Launch) -> None:
    engine, process = FakeEngine(), launch("workers.engine", "local-e0")
    spec_path(home, "local-e0").write_text(SPEC.model_dump_json())
    engine.names = ["policy", SPEC.fingerprint]
    assert await serve(engine.client(), SPEC, home, wait_s=1) is False
    assert process.poll() is None


async def test_another_model_ends_the_server_and_forgets_what_it_was_to_load(home: Path, launch: Launch) -> None:
    engine, process = FakeEngine(), launch("workers.engine", "local-e0")
    spec_path(home, "local-e0").write_text(OTHER.model_dump_json())
    engine.names = ["policy", OTHER.fingerprint]
    Desired(message=ApplyInput(run="r", engine=engine.info, version=1, manifest="m")).write(home)
    serving = asyncio.create_task(serve(engine.client(), SPEC, home, wait_s=30))
    assert await asyncio.to_thread(process.wait, 10) == -signal.SIGKILL
    engine.names = ["policy", SPEC.fingerprint]
    assert await serving is True
    assert read_spec(home, "local-e0") == SPEC
    assert Desired.read(home, "local-e0") is None


async def test_a_server_that_kept_an_old_spec_is_ended_though_the_file_is_new(home: Path, launch: Launch) -> None:
    engine, process = FakeEngine(), launch("workers.engine", "local-e0")
    spec_path(home, "local-e0").write_text(SPEC.model_dump_json())
    engine.names = ["policy", OTHER.fingerprint]
    serving = asyncio.create_task(serve(engine.client(), SPEC, home, wait_s=30))
    assert await asyncio.to_thread(process.wait, 10) == -signal.SIGKILL
    engine.names = ["policy", SPEC.fingerprint]
    assert await serving is True


def test_a_pid_that_is_somebody_elses_now_is_not_ended(home: Path, launch: Launch) -> None:
    process = launch("something.else")
    end_server(home, "local-e0")
    assert process.poll() is None
    assert os.getpgid(process.pid)


async def test_a_server_that_ends_again_and_again_is_reported_in_its_own_words(home: Path, launch: Launch) -> None:
    engine = FakeEngine()
    engine.down = True
    log = "INFO fine\nValueError: head_dim 16 is not supported\nRuntimeError: Engine core initialization failed.\n"
    (home / "logs" / "local-e0.log").write_text(log)
    serving = asyncio.create_task(serve(engine.client(), SPEC, home, wait_s=60))
    while not serving.done():
        launch("workers.engine", "local-e0")
        await asyncio.sleep(0.4)
    with pytest.raises(EngineError, match=r"ended 3 times.*ValueError: head_dim 16 is not supported \(log: "):
        await serving


async def test_without_a_launcher_the_error_says_what_starts_one(home: Path) -> None:
    engine = FakeEngine()
    engine.down = True
    with pytest.raises(EngineError, match="ratchet up"):
        await serve(engine.client(), SPEC, home, wait_s=0.2)
