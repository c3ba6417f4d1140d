"""`ratchet replay` as a person runs it, over a real database, object store and Docker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from click.testing import Result
from sqlalchemy import Engine
from typer.testing import CliRunner

from activities.replay.player import KIND
from activities.sandbox.docker import DockerBackend
from storage.objects import ObjectStore
from tests.sandbox.attempts import Recorder
from tests.sandbox.conftest import docker
from workers import replay_cli

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[2]
MAIN = "from workers.cli import main; main()"


@pytest.fixture
def recorder(
    backend: DockerBackend,
    docker_host: str,
    database: Engine,
    object_store: ObjectStore,
    s3_endpoint: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Recorder:
    """Its attempts are in the stack that the environment names."""
    endpoint, access, secret = s3_endpoint
    settings = {
        "HOME": str(tmp_path),
        "DATABASE_URL": str(database.url),
        "S3_ENDPOINT": endpoint,
        "S3_BUCKET": object_store.bucket,
        "S3_ACCESS_KEY": access,
        "S3_SECRET_KEY": secret,
        "DOCKER_HOST": docker_host,
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"RATCHET_{name}", value)
    return Recorder(backend, database, object_store, tmp_path)


@pytest.fixture
async def agreeing(recorder: Recorder) -> str:
    return await recorder.play("cat /data/word", "cat /data/word > out")


@pytest.fixture
async def differing(recorder: Recorder) -> str:
    return await recorder.play("echo same; date +%N; cat /proc/sys/kernel/random/uuid", "cat /data/word > out")


def ratchet(*argv: str, code: int = 0) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    replay_cli.register(app)
    result = CliRunner().invoke(app, ["replay", *argv])
    assert result.exit_code == code, result.output
    return result


def test_an_attempt_that_agrees_ends_with_0_and_says_what_was_compared(agreeing: str) -> None:
    out = ratchet(agreeing).stdout
    assert out.startswith(f"{agreeing}: task ") and "image sha256:" in out
    assert "turn 0  $ cat /data/word\n  recorded exit 0, replayed exit 0: agrees" in out
    assert "reward recorded 1, replayed 1 (check: exit 0)" in out
    assert out.endswith("agrees: 2 of 2 commands could be compared, all ended as recorded\n")


def test_an_attempt_that_differs_ends_with_1_and_shows_both_outputs_as_a_diff(differing: str) -> None:
    out = ratchet(differing, code=1).stdout
    assert "--- recorded" in out and "+++ replayed" in out and "     same\n" in out
    assert out.count("    -") >= 2 and "turn 1" not in out.replace("turn 1 differs", "")
    assert "not graded: turn 0 differs; --all goes on" in out and out.endswith("differs at turn 0\n")


def test_all_goes_on_to_the_verdict(differing: str) -> None:
    out = ratchet(differing, "--all", code=1).stdout
    assert "turn 1  $ cat /data/word > out" in out and "reward recorded 1, replayed 1" in out


def test_an_episode_id_replays_its_last_attempt(agreeing: str) -> None:
    assert ratchet(agreeing.rpartition("/")[0]).stdout.startswith(f"{agreeing}: ")


def test_without_its_model_a_difference_is_shown_by_digest(recorder: Recorder, differing: str) -> None:
    (recorder.models / "tiny" / "tokenizer.json").unlink()
    out = ratchet(differing, code=1).stdout
    assert "recorded output sha256 " in out and "whose text is nowhere" in out and "    same\n" in out


def test_json_is_all_that_is_printed(agreeing: str, differing: str) -> None:
    whole = json.loads(ratchet(agreeing, "--json").stdout)
    assert (
        whole["agrees"] and whole["verdict"]["agrees"] and [turn["match"] for turn in whole["turns"]] == ["agrees"] * 2
    )
    parted = json.loads(ratchet(differing, "--json", code=1).stdout)
    (turn,) = parted["turns"]
    assert not parted["agrees"] and turn["match"] == "differs"
    assert turn["recorded_output"] != turn["replayed_output"]


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_what_can_not_be_replayed_ends_with_2_and_a_sentence(
    recorder: Recorder, agreeing: str, as_json: list[str]
) -> None:
    unknown = ratchet("r/g77/e0/a0", *as_json, code=2)
    assert "no episode 'r/g77/e0/a0'; ids look like <run>/g<n>/e<k>/a<m>" in unknown.stderr and unknown.stdout == ""
    recorder.change(agreeing, image_id="sha256:" + "0" * 64)
    gone = ratchet(agreeing, *as_json, code=2)
    assert f"{agreeing} can't be replayed: the image sha256:0" in gone.stderr and "docker load" in gone.stderr
    recorder.change(agreeing, image_id="")
    assert "never had a sandbox" in ratchet(agreeing, *as_json, code=2).stderr
    (recorder.taskset / "write.json").unlink()
    recorder.change(agreeing, task="nowhere/write")
    assert "no taskset 'nowhere'" in ratchet(agreeing, *as_json, code=2).stderr


def test_a_daemon_that_is_not_there_is_said(agreeing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setattr("activities.sandbox.daemon.PAUSES_S", (0.01,))
    assert "no answer from unix:///nonexistent/docker.sock" in ratchet(agreeing, code=2).stderr


def test_a_place_without_a_database_says_so_and_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    assert "`ratchet up` starts a stack there" in ratchet("r/g0/e0", code=2).stderr


@pytest.fixture
async def slow(recorder: Recorder) -> str:
    return await recorder.play("sleep 0.9; cat /data/word > out")


async def test_an_interrupted_replay_leaves_no_container(slow: str, tmp_path: Path, docker_host: str) -> None:
    """A process of its own, by SIGINT."""
    mine = DockerBackend(docker_host, tmp_path, slots=1)
    words = [sys.executable, "-c", MAIN, "replay", slow]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*words, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        while not await mine._names({"ratchet.kind": KIND}):
            assert process.returncode is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.wait_for(process.communicate(), 150)
        assert (process.returncode, said) == (130, b"interrupted; its sandbox is removed\n")
        assert await mine._names({"ratchet.kind": KIND}) == set()
        assert mine._boxes.having("ratchet.kind", KIND) == []
    finally:
        await mine.aclose()


def test_a_replay_that_is_told_to_end_leaves_no_container(slow: str, tmp_path: Path, docker_host: str) -> None:
    """The same by SIGTERM, which only what the command itself has set up can outlive here."""
    mine = DockerBackend(docker_host, tmp_path, slots=1)

    over = threading.Event()

    def end_it() -> None:
        while not over.is_set():
            if docker(docker_host, "ps", "-aq", "--filter", f"label=ratchet.kind={KIND}"):
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(end_it)
        try:
            result = ratchet(slow, code=130)
        finally:
            over.set()
        ending.result()
    assert result.stderr == "interrupted; its sandbox is removed\n"
    assert docker(docker_host, "ps", "-aq", "--filter", f"label=ratchet.kind={KIND}") == ""
    assert mine._boxes.having("ratchet.kind", KIND) == []
