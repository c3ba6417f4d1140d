"""The activities over a real backend: what the workflows see."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from tasksets.base import Task
from tests.sandbox.conftest import docker
from workflows.contracts import (
    AcquireInput,
    ActInput,
    ActOutput,
    ReleaseInput,
    SandboxLease,
    Split,
    SweepInput,
    TaskRef,
    VerifyInput,
    VerifyOutput,
)
from workflows.errors import SandboxError, VerifierBrokenByAnswer, VerifierError

pytestmark = pytest.mark.docker

WRITE = Task(
    id="write",
    kind="write",
    instruction="Write the word of /data/word to the file out, and say done.",
    setup="printf 'plum\\n' > /data/word",
    check="""
        [ -e /work/broken ] && exit 7
        [ -p /work/out ] && cat /work/out
        [ "$(cat /work/out)" = plum ] && [ "$ANSWER" = done ]
    """,
    oracle=["cat /data/word > out"],
    oracle_answer="done",
)


class Tasks:
    name = "tests"
    tasks: dict[str, Task] = {  # noqa: RUF012
        "write": WRITE,
        "bad-setup": WRITE.model_copy(update={"id": "bad-setup", "setup": "echo no such luck; exit 3"}),
        "bad-check": WRITE.model_copy(update={"id": "bad-check", "check": "exit 2"}),
        "wrong-oracle": WRITE.model_copy(update={"id": "wrong-oracle", "oracle": ["touch broken"]}),
    }

    def ids(self, split: Split) -> list[str]:
        return list(self.tasks)

    def load(self, task_id: str) -> Task:
        return self.tasks[task_id]


class Episode:
    """One attempt, as the workflow drives it."""

    def __init__(self, activities: SandboxActivities, task_id: str, attempt: str) -> None:
        self.activities = activities
        self.task = TaskRef(taskset="tests", split=Split.TRAIN, task_id=task_id)
        self.attempt = attempt
        self.lease: SandboxLease
        self._turn = 0

    async def acquire(self) -> None:
        message = AcquireInput(run="acts", group_id="acts/g0", attempt_id=self.attempt, task=self.task)
        self.lease = (await call(self.activities.acquire, message)).lease

    async def act(self, command: str, *, timeout_s: float = 5, chars: int = 2000, op_id: str = "") -> ActOutput:
        self._turn += 1
        message = ActInput(
            lease=self.lease,
            op_id=op_id or f"t{self._turn}",
            turn=self._turn,
            command=command,
            step_timeout_s=timeout_s,
            max_output_chars=chars,
        )
        result: ActOutput = await call(self.activities.act, message)
        return result

    async def verify(self, answer: str = "done") -> VerifyOutput:
        result: VerifyOutput = await call(
            self.activities.verify, VerifyInput(lease=self.lease, task=self.task, answer=answer)
        )
        return result


async def call(method: Callable[[Any], Awaitable[Any]], message: object) -> Any:
    return await ActivityEnvironment().run(method, message)


@pytest.fixture
def activities(backend: DockerBackend) -> SandboxActivities:
    return SandboxActivities(backend, lambda name: Tasks(), host="here")


@pytest.fixture
async def episode(activities: SandboxActivities, request: pytest.FixtureRequest) -> Any:
    task_id = getattr(request, "param", "write")
    episode = Episode(activities, task_id, f"acts/g0/e0/{request.node.name}")
    await episode.acquire()
    yield episode
    await call(activities.release, ReleaseInput(attempt_id=episode.attempt, lease=episode.lease))
    await activities._backend.settled()


async def test_an_episode_that_solves_its_task_is_rewarded(episode: Episode) -> None:
    seen = await episode.act("cat /data/word")
    assert (seen.exit_code, seen.observation()) == (0, "plum")
    await episode.act("echo plum > out")
    verdict = await episode.verify()
    assert (verdict.passed, verdict.reward) == (True, 1.0)


async def test_an_episode_that_does_not_is_not(episode: Episode) -> None:
    verdict = await episode.verify()
    assert (verdict.passed, verdict.reward, verdict.detail) == (False, 0.0, "check: exit 1")


async def test_a_retried_act_replays(episode: Episode) -> None:
    first = await episode.act("echo line >> log; cat log", op_id="t0")
    again = await episode.act("echo line >> log; cat log", op_id="t0")
    assert (first.replayed, again.replayed, again.output) == (False, True, "line\n")


async def test_a_time_out_is_told_and_counted_as_the_commands_own_time(episode: Episode) -> None:
    result = await episode.act("echo begun; sleep 60", timeout_s=0.5)
    assert (result.timed_out, result.exit_code, result.signal, result.sandbox_broken) == (True, None, None, "")
    assert 0.5 <= result.command_s < 2.0
    assert result.output == "begun\n"


async def test_an_agent_that_breaks_its_sandbox_is_told_so(episode: Episode) -> None:
    result = await episode.act("cat /dev/zero > big")
    assert result.sandbox_broken == "its disk is full: /work"


async def test_a_sandbox_that_was_taken_away_is_lost_and_final(episode: Episode, backend: DockerBackend) -> None:
    docker(backend._daemon.docker_host, "rm", "-f", episode.lease.sandbox_id)
    with pytest.raises(SandboxError) as lost:
        await episode.act("echo anybody")
    assert not lost.value.retryable
    with pytest.raises(SandboxError) as lost:
        await episode.verify()
    assert not lost.value.retryable


async def test_a_lease_of_another_host_is_left_to_its_worker(episode: Episode, backend: DockerBackend) -> None:
    elsewhere = Episode(SandboxActivities(backend, lambda name: Tasks(), host="there"), "write", episode.attempt)
    elsewhere.lease = episode.lease
    with pytest.raises(SandboxError, match="lives on here, this is there") as refused:
        await elsewhere.act("echo")
    assert refused.value.retryable


async def test_what_the_agent_left_running_is_dead_before_the_check(episode: Episode) -> None:
    await episode.act("echo plum > out; (while :; do rm -f out; done) &")
    await episode.act("for i in 1 2 3; do setsid sh -c 'trap \"\" TERM; while :; do echo x > out; done' & done")
    assert not (await episode.verify()).passed
    assert (await episode.verify()).detail == "check: exit 1"


async def test_an_answer_that_breaks_the_check_is_the_models_failure(episode: Episode) -> None:
    await episode.act("touch broken")
    with pytest.raises(VerifierBrokenByAnswer, match=r"exit 7; a known-good answer passes"):
        await episode.verify()


async def test_an_answer_too_long_for_the_check_is_the_models_failure(episode: Episode) -> None:
    with pytest.raises(VerifierBrokenByAnswer, match="exit 126"):
        await episode.verify("x" * 200_000)


async def test_an_answer_that_hangs_the_check_is_the_models_failure(
    episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.sandbox.verification.CHECK_S", 0.5)
    await episode.act("mkfifo out")
    with pytest.raises(VerifierBrokenByAnswer, match=r"timed out after .* a known-good answer passes"):
        await episode.verify()


@pytest.mark.parametrize("episode", ["bad-check", "wrong-oracle"], indirect=True)
async def test_a_check_that_breaks_on_a_known_good_answer_is_ours(episode: Episode) -> None:
    await episode.act("touch broken")
    with pytest.raises(VerifierError, match="on a known-good answer") as broken:
        await episode.verify()
    assert not broken.value.retryable


async def test_a_proof_leaves_no_sandbox_behind(episode: Episode, backend: DockerBackend) -> None:
    await episode.act("touch broken")
    with pytest.raises(VerifierBrokenByAnswer):
        await episode.verify()
    assert await backend._names({"ratchet.attempt": episode.attempt}) == {episode.lease.sandbox_id}


async def test_a_setup_that_fails_is_final_and_leaves_nothing(
    activities: SandboxActivities, backend: DockerBackend
) -> None:
    episode = Episode(activities, "bad-setup", "acts/g0/e1/a0")
    with pytest.raises(SandboxError, match="the setup of bad-setup failed: exit 3: no such luck") as failed:
        await episode.acquire()
    assert not failed.value.retryable
    assert await backend._names({"ratchet.attempt": episode.attempt}) == set()


async def test_a_release_without_a_lease_removes_by_attempt(
    activities: SandboxActivities, backend: DockerBackend
) -> None:
    episode = Episode(activities, "write", "acts/g0/e2/a0")
    await episode.acquire()
    for _ in range(2):
        await call(activities.release, ReleaseInput(attempt_id=episode.attempt))
    await backend.settled()
    assert await backend._names({"ratchet.attempt": episode.attempt}) == set()


async def test_a_sweep_reports_what_it_removed(activities: SandboxActivities) -> None:
    await Episode(activities, "write", "acts/g0/e3/a0").acquire()
    swept = await call(activities.sweep, SweepInput(run="acts"))
    assert swept.containers >= 1
    assert (await call(activities.sweep, SweepInput(run="acts"))).containers == 0
