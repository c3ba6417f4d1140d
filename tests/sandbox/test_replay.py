"""A lost sandbox's journal replayed into a fresh one, with real containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from tests.sandbox.conftest import docker
from tests.sandbox.test_activities import Episode, Tasks, call
from tests.workflows.conftest import temporal, unique
from tests.workflows.test_episode import limits
from workers.parts import methods
from workflows.contracts import (
    AcquireInput,
    Action,
    ActionKind,
    EpisodeInput,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    FinishReason,
    GenerateInput,
    GenerateOutput,
    JournalEntry,
    Outcome,
    ReleaseInput,
    ReplayInput,
    ReplayOutput,
    Split,
    StopReason,
    TaskRef,
)
from workflows.episode import Episode as EpisodeWorkflow
from workflows.errors import SandboxError

__all__ = ["temporal"]

pytestmark = pytest.mark.docker

RANDOM = "cat /proc/sys/kernel/random/uuid"


@pytest.fixture
def activities(backend: DockerBackend) -> SandboxActivities:
    return SandboxActivities(backend, lambda name: Tasks(), host="here")


class Attempt(Episode):
    """An attempt that keeps its journal and may lose its sandbox."""

    def __init__(self, activities: SandboxActivities, attempt: str) -> None:
        super().__init__(activities, "write", attempt)
        self.generation = 0
        self.journal: list[JournalEntry] = []

    async def run(self, command: str) -> None:
        out = await self.act(command)
        entry = JournalEntry(
            turn=self._turn,
            op_id=f"t{self._turn}",
            command=command,
            step_timeout_s=5,
            ending=f"exit {out.exit_code}, {out.total_bytes} bytes",
            output_digest=out.output_digest,
        )
        self.journal.append(entry)

    async def next_sandbox(self) -> None:
        self.generation += 1
        message = AcquireInput(
            run="acts", group_id="acts/g0", attempt_id=self.attempt, task=self.task, generation=self.generation
        )
        self.lease = (await call(self.activities.acquire, message)).lease

    async def replay(self) -> ReplayOutput:
        message = ReplayInput(lease=self.lease, entries=self.journal, max_output_chars=2000)
        out: ReplayOutput = await call(self.activities.replay, message)
        return out


@pytest.fixture
async def attempt(activities: SandboxActivities, request: pytest.FixtureRequest) -> Any:
    made = Attempt(activities, f"acts/g9/e0/{request.node.name}")
    await made.acquire()
    yield made
    await call(activities.release, ReleaseInput(attempt_id=made.attempt))


async def test_a_fresh_sandbox_gets_the_state_of_the_lost_one_and_takes_its_place(
    attempt: Attempt, backend: DockerBackend
) -> None:
    await attempt.run("echo one > log; cat log")
    await attempt.run("echo two >> log; cat log nowhere")
    lost = attempt.lease
    await attempt.next_sandbox()
    assert attempt.lease.sandbox_id != lost.sandbox_id and attempt.lease.image_id == lost.image_id
    assert await backend._names({"ratchet.attempt": attempt.attempt}) == {attempt.lease.sandbox_id}
    out = await attempt.replay()
    assert (out.differs_at, out.why) == (None, "")
    assert (await attempt.act("cat log")).output == "one\ntwo\n"


async def test_a_retried_replay_runs_nothing_twice(attempt: Attempt) -> None:
    await attempt.run("echo line >> log; wc -l < log")
    await attempt.next_sandbox()
    for _ in range(3):
        assert (await attempt.replay()).differs_at is None
    assert (await attempt.act("wc -l < log")).output == "1\n"


async def test_a_replay_stops_at_the_first_command_that_ends_otherwise(attempt: Attempt) -> None:
    await attempt.run("echo same")
    await attempt.run(f"{RANDOM}; exit 3")
    await attempt.run("echo never reached > log")
    await attempt.next_sandbox()
    out = await attempt.replay()
    assert (out.differs_at, out.why) == (2, "exit 3, 37 bytes, recorded was exit 3, 37 bytes")
    assert (await attempt.act("ls", op_id="look")).output == ""


async def test_a_command_that_breaks_the_fresh_sandbox_differs(attempt: Attempt) -> None:
    await attempt.run("echo fine")
    attempt.journal[0] = attempt.journal[0].model_copy(update={"command": "cat /dev/zero > big"})
    await attempt.next_sandbox()
    assert "it broke the sandbox (its disk is full" in (await attempt.replay()).why


async def test_a_fresh_sandbox_that_is_taken_away_in_its_replay_is_lost_too(
    attempt: Attempt, backend: DockerBackend
) -> None:
    await attempt.run("echo fine")
    await attempt.next_sandbox()
    docker(backend._daemon.docker_host, "rm", "-f", attempt.lease.sandbox_id)
    with pytest.raises(SandboxError) as lost:
        await attempt.replay()
    assert not lost.value.retryable


async def test_a_release_removes_the_sandboxes_of_every_loss(
    attempt: Attempt, activities: SandboxActivities, backend: DockerBackend
) -> None:
    await attempt.next_sandbox()
    await attempt.next_sandbox()
    docker(backend._daemon.docker_host, "rm", "-f", attempt.lease.sandbox_id)
    assert backend._boxes.having("ratchet.attempt", attempt.attempt)
    await call(activities.release, ReleaseInput(attempt_id=attempt.attempt))
    await backend.settled()
    assert await backend._names({"ratchet.attempt": attempt.attempt}) == set()
    assert backend._boxes.having("ratchet.attempt", attempt.attempt) == []


class Script:
    """Generation by script and a record that is kept; `before(turn)` runs before each answer."""

    def __init__(self, commands: list[str], before: Callable[[int, str], None]) -> None:
        self.commands, self.before = commands, before
        self.turns: list[int] = []
        self.records: list[EpisodeRecord] = []

    @activity.defn
    async def generate(self, message: GenerateInput) -> GenerateOutput:
        self.turns.append(message.turn)
        self.before(message.turn, message.attempt_id)
        action = Action(kind=ActionKind.FINAL, answer="done")
        if message.turn < len(self.commands):
            action = Action(kind=ActionKind.COMMAND, command=self.commands[message.turn])
        return GenerateOutput(segment=f"s{message.turn}", action=action, finish_reason=FinishReason.STOP)

    @activity.defn
    async def record_episode(self, message: EpisodeRecord) -> None:
        self.records.append(message)


async def lose_in_mid_episode(
    client: Client, backend: DockerBackend, activities: SandboxActivities, commands: list[str], *, replay: bool
) -> tuple[EpisodeSummary, Script]:
    """Play an attempt whose container is removed before the answer of turn 2."""

    def remove(turn: int, attempt: str) -> None:
        if turn == 2:
            docker(backend._daemon.docker_host, "rm", "-f", backend.id_of(attempt))

    script, queue = Script(commands, remove), unique("queue")
    played = EpisodeInput(
        run="acts",
        group_id=unique("acts-g"),
        index=0,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TaskRef(taskset="tests", split=Split.TRAIN, task_id="write"),
        limits=limits(max_turns=8, replay_on_loss=replay),
        seed=1,
    )
    given = [*methods(activities), *methods(script)]
    async with Worker(client, task_queue=queue, workflows=[EpisodeWorkflow], activities=given, build_id="tests"):
        summary: EpisodeSummary = await client.execute_workflow(
            "Episode", played, id=played.attempt_id, task_queue=queue, result_type=EpisodeSummary
        )
    await backend.settled()
    assert await backend._names({"ratchet.attempt": played.attempt_id}) == set()
    return summary, script


async def test_an_episode_outlives_its_container(
    temporal: Client, backend: DockerBackend, activities: SandboxActivities
) -> None:
    commands = ["cat /data/word > out", "echo line >> log; cat log", "wc -l < log", "cat out"]
    summary, script = await lose_in_mid_episode(temporal, backend, activities, commands, replay=True)
    (record,) = script.records
    assert (summary.outcome, summary.replays) == (Outcome.MODEL_SUCCESS, 1)
    assert script.turns == [0, 1, 2, 3, 4], "no turn is lost"
    assert [turn.exit_code for turn in record.turns] == [0, 0, 0, 0, None]
    assert all(len(turn.output_digest) == 64 for turn in record.turns[:4])


@pytest.mark.parametrize(
    ("commands", "replay", "said"),
    [
        ([RANDOM, "true", "true"], True, "replayed, turn 0 differed: exit 0, 37 bytes, recorded was exit 0, 37 bytes"),
        (["kill -TERM $$", "true", "true"], True, "the command of turn 0 had no exit code"),
        (["true", "true", "true"], False, "the container was removed"),
    ],
    ids=["differs", "can not be replayed", "not wanted"],
)
async def test_an_episode_that_can_not_be_brought_back_ends_as_lost_and_says_why(
    temporal: Client,
    backend: DockerBackend,
    activities: SandboxActivities,
    commands: list[str],
    replay: bool,
    said: str,
) -> None:
    summary, script = await lose_in_mid_episode(temporal, backend, activities, commands, replay=replay)
    assert (summary.outcome, summary.stop_reason) == (Outcome.INFRA_FAILURE, StopReason.SANDBOX_LOST)
    assert said in script.records[0].why
