"""Attempts at tasks with machines of their own, through the activities that the workflows call."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.channel import journaled, key_of
from activities.sandbox.docker import DockerBackend
from activities.sandbox.machines.state import State
from tasksets.base import Task
from tests.sandbox.conftest import docker
from tests.sandbox.machines import Ground, harbor, terminal_bench
from tests.sandbox.test_activities import Episode, call
from tests.tasksets.public import HARBOR
from workflows.contracts import AcquireInput, JournalEntry, ReleaseInput, ReplayInput, Split, SweepInput
from workflows.errors import SandboxError, VerifierBrokenByAnswer

pytestmark = pytest.mark.docker


class Only:
    """A taskset of one task."""

    name = "tests"

    def __init__(self, task: Task) -> None:
        self._task = task

    def ids(self, split: Split) -> list[str]:
        return [self._task.id]

    def load(self, task_id: str) -> Task:
        return self._task


Attempted = Callable[[Task], Any]
_numbers = itertools.count()


@pytest.fixture
def attempted(ground: Ground) -> Attempted:
    @asynccontextmanager
    async def attempted(task: Task) -> AsyncIterator[Episode]:
        activities = SandboxActivities(ground.backend, lambda name: Only(task), host="here")
        episode = Episode(activities, task.id, f"acts/g0/e0/a{next(_numbers)}")
        try:
            await episode.acquire()
            yield episode
        finally:
            await call(activities.release, ReleaseInput(attempt_id=episode.attempt))
            await ground.backend.settled()

    return attempted


@pytest.mark.parametrize("make", [harbor, terminal_bench])
async def test_an_attempt_that_solves_its_task_is_rewarded(attempted: Attempted, tmp_path: Path, make: Any) -> None:
    async with attempted(make(tmp_path)) as episode:
        seen = await episode.act("pwd; id -u")
        assert (seen.exit_code, seen.observation()) == (0, "/app\n0")
        await episode.act("echo hello > greeting.txt")
        verdict = await episode.verify()
        assert (verdict.passed, verdict.reward, verdict.tampered) == (True, 1.0, False)
        again = await episode.verify()
        assert again.reward == 1.0


async def test_the_oracles_commands_are_an_agents_commands(attempted: Attempted, tmp_path: Path) -> None:
    task = harbor(tmp_path)
    async with attempted(task) as episode:
        for command in task.oracle:
            assert (await episode.act(command)).exit_code == 0
        assert (await episode.verify()).passed


async def test_tampering_is_told_with_its_evidence(attempted: Attempted, tmp_path: Path) -> None:
    async with attempted(harbor(tmp_path)) as episode:
        await episode.act("echo hello > greeting.txt; echo '#' >> /usr/bin/pytest")
        verdict = await episode.verify()
    assert (verdict.reward, verdict.tampered) == (0.0, True)
    assert verdict.evidence == {"tampered": "/usr/bin/pytest is not what it was"} == {"tampered": verdict.detail}


async def test_a_retried_acquire_finds_the_machine_as_it_was_left(
    ground: Ground, attempted: Attempted, tmp_path: Path
) -> None:
    task = harbor(tmp_path)
    async with attempted(task) as episode:
        await episode.act("echo hello > greeting.txt")
        message = AcquireInput(run="acts", group_id="acts/g0", attempt_id=episode.attempt, task=episode.task)
        again = await call(SandboxActivities(ground.backend, lambda name: Only(task), host="here").acquire, message)
        assert again.lease == episode.lease
        assert (await episode.act("cat greeting.txt")).output == "hello\n"


async def test_a_lost_machines_commands_are_run_again_in_another(
    ground: Ground, attempted: Attempted, tmp_path: Path, docker_host: str
) -> None:
    task = harbor(tmp_path)
    async with attempted(task) as episode:
        first = await episode.act("echo hello > greeting.txt; whoami", op_id="t0")
        docker(docker_host, "rm", "-f", episode.lease.container_id)
        message = AcquireInput(
            run="acts", group_id="acts/g0", attempt_id=episode.attempt, task=episode.task, generation=1
        )
        episode.lease = (await call(episode.activities.acquire, message)).lease
        entry = JournalEntry(
            turn=0,
            op_id="t0",
            command="echo hello > greeting.txt; whoami",
            step_timeout_s=5,
            ending="",
            output_digest=first.output_digest,
        )
        replay = ReplayInput(lease=episode.lease, entries=[entry], max_output_chars=2000)
        assert (await call(episode.activities.replay, replay)).differs_at is None
        assert (await episode.verify()).passed


SERVES = """cd /run/ratchet/box
rm s
setsid python3 -c '
import socket
server = socket.socket(socket.AF_UNIX)
server.bind("s")
server.listen()
while True:
    client, _ = server.accept()
    client.recv(99999)
    client.sendall(ANSWER)
    client.close()
' > /dev/null 2>&1 &
until [ -S /run/ratchet/box/s ]; do sleep 0.05; done"""
SILENCES = {
    "takes the socket away": "rm /run/ratchet/box/s",
    "floods": SERVES.replace("ANSWER", 'b"x" * 9000000'),
    "speaks nonsense": SERVES.replace("ANSWER", 'b"new nonsense"'),
}


@pytest.mark.parametrize("name", SILENCES)
async def test_an_agent_that_silences_its_machine_broke_it_and_is_not_excused(
    attempted: Attempted, tmp_path: Path, name: str
) -> None:
    async with attempted(harbor(tmp_path)) as episode:
        await episode.act(SILENCES[name])
        broken = await episode.act("true")
        assert "does not answer any more" in broken.sandbox_broken
        assert broken.evidence["blame"] == "agent"
        # Its files are graded all the same, from outside.
        assert not (await episode.verify()).passed


async def test_a_journal_that_an_agent_wrote_itself_reaches_nothing_of_the_hosts(
    ground: Ground, attempted: Attempted, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0 0 0 0 0 6 6 0 0 0 0 -1 -\nsecret")
    async with attempted(harbor(tmp_path)) as episode:
        box = ground.backend.boxes.box(episode.lease.sandbox_id)
        await episode.act(
            f"ln -s {secret} /run/ratchet/box/{key_of('act-forged')}; mkfifo /run/ratchet/box/{key_of('p')}"
        )
        assert journaled(box, "act-forged") is None and journaled(box, "p") is None


async def test_an_agent_that_fills_its_memory_or_processes_breaks_its_machine(
    attempted: Attempted, tmp_path: Path
) -> None:
    toml = HARBOR["task.toml"].replace('memory = "1G"', 'memory = "64M"')
    async with attempted(harbor(tmp_path, **{"task.toml": toml})) as episode:
        broken = await episode.act("python3 -c 'x = bytearray(1 << 28)'", timeout_s=20)
        assert "ran out of memory" in broken.sandbox_broken


@pytest.mark.parametrize(
    "writes", ["head -c 30000000 /dev/zero > x", "while :; do head -c 5000000 /dev/zero >> x; done"]
)
async def test_an_agent_that_takes_more_of_the_disk_than_its_task_grants_broke_its_machine(
    attempted: Attempted, tmp_path: Path, writes: str
) -> None:
    toml = HARBOR["task.toml"].replace("[environment]", "[environment]\nstorage_mb = 20")
    async with attempted(harbor(tmp_path, **{"task.toml": toml})) as episode:
        assert (await episode.act("head -c 5000000 /dev/zero > y")).sandbox_broken == ""
        broken = await episode.act(writes, timeout_s=30)
        assert "its disk is full" in broken.sandbox_broken and "of 20 MB" in broken.sandbox_broken
        assert broken.evidence["blame"] == "agent" and not broken.timed_out


async def test_an_agent_that_fills_the_journals_folder_is_found_out_as_well(
    attempted: Attempted, tmp_path: Path
) -> None:
    toml = HARBOR["task.toml"].replace("[environment]", "[environment]\nstorage_mb = 20")
    async with attempted(harbor(tmp_path, **{"task.toml": toml})) as episode:
        assert "disk is full" in (await episode.act("head -c 30000000 /dev/zero > /run/ratchet/box/x")).sandbox_broken


async def test_an_answer_that_fills_the_grading_machines_disk_broke_the_verifier(
    attempted: Attempted, tmp_path: Path
) -> None:
    script = "#!/bin/bash\n[ -e /app/fill ] && head -c 30000000 /dev/zero > /x\necho 1 > /logs/verifier/reward.txt\n"
    toml = HARBOR["task.toml"].replace("[environment]", "[environment]\nstorage_mb = 20")
    async with attempted(harbor(tmp_path, **{"task.toml": toml, "tests/test.sh": script})) as episode:
        await episode.act("touch fill")
        with pytest.raises(VerifierBrokenByAnswer, match="its disk is full"):
            await episode.verify()


async def test_a_grading_machine_that_an_answer_exhausts_is_the_answers_doing(
    attempted: Attempted, tmp_path: Path
) -> None:
    script = (
        "#!/bin/bash\n[ -e /app/eat ] && exec python3 -c 'x = bytearray(1 << 28)'\necho 1 > /logs/verifier/reward.txt\n"
    )
    toml = HARBOR["task.toml"].replace('memory = "1G"', 'memory = "64M"')
    async with attempted(harbor(tmp_path, **{"task.toml": toml, "tests/test.sh": script})) as episode:
        await episode.act("touch eat")
        with pytest.raises(VerifierBrokenByAnswer) as broken:
            await episode.verify()
    assert broken.value.evidence["own memory limit"] == "reached"


async def test_a_machine_that_was_taken_away_before_it_was_graded_is_infrastructure(
    attempted: Attempted, tmp_path: Path, docker_host: str
) -> None:
    async with attempted(harbor(tmp_path)) as episode:
        docker(docker_host, "rm", "-f", episode.lease.container_id)
        with pytest.raises(SandboxError, match="the container was removed"):
            await episode.verify()


async def test_a_run_that_ended_leaves_no_machine_and_no_answer(
    ground: Ground, attempted: Attempted, tmp_path: Path, docker_host: str
) -> None:
    async with attempted(harbor(tmp_path)) as episode:
        await episode.verify()
        swept = await call(episode.activities.sweep, SweepInput(run="acts"))
        assert swept.containers == 1
        assert docker(docker_host, "ps", "-aq", "--filter", "label=ratchet.run=acts") == ""


async def test_what_a_grading_that_was_cut_short_left_goes_with_its_attempt(
    ground: Ground, attempted: Attempted, tmp_path: Path, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, called = State.forget, list[State]()

    async def dies(*_: object) -> None:
        raise RuntimeError("as a killed worker")

    async def dies_once_it_has_kept(state: State) -> None:
        called.append(state)
        await (forget(state) if len(called) == 1 else dies())

    async with attempted(harbor(tmp_path)) as episode:
        with monkeypatch.context() as patch:
            patch.setattr(State, "forget", dies_once_it_has_kept)
            patch.setattr(DockerBackend, "close", dies)
            with pytest.raises(RuntimeError):
                await episode.verify()
        assert docker(docker_host, "images", "-q", "ratchet/answer") != ""
    assert docker(docker_host, "images", "-q", "ratchet/answer") == ""
    assert docker(docker_host, "ps", "-aq", "--filter", "label=ratchet.run=acts") == ""
    assert list((ground.backend.state / "grading").iterdir()) == []
