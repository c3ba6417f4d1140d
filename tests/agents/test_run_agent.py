"""The run_agent activity over real processes: how programs end, what that means, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.agents.activities import output_key
from activities.agents.endpoint import AgentEndpoint
from tests.agents.worlds import AgentWorld
from workflows.contracts import ActOutput, FailureType, RunAgentInput, RunAgentOutput, StopReason
from workflows.converter import data_converter
from workflows.errors import EngineError, SandboxError, Undetermined

PROGRAM = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('program.py')))}"
ATTEMPT = "r/g1/e0/a0"


async def run(world: AgentWorld, endpoint: AgentEndpoint, message: RunAgentInput) -> RunAgentOutput:
    out: RunAgentOutput = await ActivityEnvironment().run(world.activities(endpoint).run_agent, message)
    assert list(world.spool.iterdir()) == [], "its folder is gone"
    return out


async def test_a_program_plays_turns_whose_ids_are_the_engines_and_acts_in_the_sandbox(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.says = ["Let me see.", "Answer: 3"]
    out = await run(world, endpoint, world.message(f"{PROGRAM} 2 'ls | wc -l'"))
    assert (out.stop_reason, out.answer, out.sampled_tokens) == (
        StopReason.FINISHED,
        "3",
        sum(len(ids) for ids in world.made),
    )
    (ids,) = world.branches(out.turns)
    assert out.sequence_tokens == len(ids)
    assert "Count the cats." in world.tokenizer.decode(ids) and "3\n(exit 0)" in world.tokenizer.decode(ids)
    assert world.sandbox.commands == ["ls | wc -l"] * 2
    assert [(turn.action, turn.exit_code) for turn in out.turns] == [("ls | wc -l", 0)] * 2
    assert out.command_s == pytest.approx(0.02)
    assert {turn.min_version for turn in out.turns} == {3}


async def test_a_program_sees_nothing_of_the_workers_environment(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_S3_SECRET_KEY", "a secret")
    await run(world, endpoint, world.message(f"env; {PROGRAM} 1", env={"TOKEN": "own"}))
    printed = world.store.get(output_key("r", ATTEMPT)).decode()
    names = {line.partition("=")[0] for line in printed.splitlines() if "=" in line}
    assert "RATCHET_S3_SECRET_KEY" not in names and "a secret" not in printed
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "RATCHET_SANDBOX", "TOKEN"} <= names


async def test_the_answer_file_goes_before_what_the_policy_said_last(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    out = await run(world, endpoint, world.message(f"{PROGRAM} 1; echo 17 > $RATCHET_ANSWER_FILE"))
    assert out.answer == "17"


async def test_a_program_that_fails_after_an_answer_is_graded_for_what_it_left(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    """A policy can't escape by crashing what it plays in."""
    out = await run(world, endpoint, world.message(f"{PROGRAM} 1; echo oh no; exit 3"))
    assert out.stop_reason is StopReason.FINISHED
    assert "exit 3" in out.why and "oh no" in out.why


@pytest.mark.parametrize("command", ["exit 0", "no-such-program", "sleep 60"])
async def test_a_program_that_never_asked_says_nothing_of_the_policy(
    command: str, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    with pytest.raises(Undetermined, match="never got an answer"):
        await run(world, endpoint, world.message(command, own_time_s=0.5))


async def test_a_program_that_somebody_killed_is_undetermined(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    with pytest.raises(Undetermined, match="somebody killed"):
        await run(world, endpoint, world.message(f"{PROGRAM} 1; kill -9 $$"))


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 2}, StopReason.MAX_TURNS), ({"max_tokens": 15}, StopReason.MAX_TOKENS)]
)
async def test_a_spent_budget_ends_the_attempt_whether_the_program_heeds_it_or_not(
    limits: dict[str, int], reason: StopReason, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    heeding = await run(world, endpoint, world.message(f"{PROGRAM} 9 ls", **limits))
    world.sandbox.kept.clear()
    began = time.monotonic()
    deaf = await run(world, endpoint, world.message(f"{PROGRAM} 9 ls; sleep 60", grace_s=0, **limits))
    assert time.monotonic() - began < 30
    assert [out.stop_reason for out in (heeding, deaf)] == [reason, reason]
    assert all(len(out.turns) == 2 for out in (heeding, deaf))


async def test_a_program_that_takes_too_long_by_itself_is_ended(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    out = await run(world, endpoint, world.message(f"{PROGRAM} 1; sleep 60", own_time_s=4))
    assert out.stop_reason is StopReason.TIME_BUDGET and "own_time_s" in out.why


async def test_waiting_for_an_engine_is_not_the_programs_own_time(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    world.engine.delay_s = 4.5
    out = await run(world, endpoint, world.message(f"{PROGRAM} 1", own_time_s=4))
    assert out.stop_reason is StopReason.FINISHED


async def test_a_sandbox_that_the_agent_breaks_ends_the_attempt_at_once(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    evidence = {"blame": "agent"}
    world.sandbox.says = lambda _: ActOutput(exit_code=None, sandbox_broken="it killed PID 1", evidence=evidence)
    out = await run(world, endpoint, world.message(f"{PROGRAM} 9 'kill 1'"))
    assert (out.stop_reason, out.why) == (StopReason.SANDBOX_KILLED_BY_AGENT, "it killed PID 1")
    assert out.evidence == evidence and len(out.turns) == 1


async def test_commands_that_use_up_their_time_end_the_attempt(world: AgentWorld, endpoint: AgentEndpoint) -> None:
    world.sandbox.says = lambda _: ActOutput(exit_code=0, command_s=3)
    out = await run(world, endpoint, world.message(f"{PROGRAM} 9 make", time_budget_s=5))
    assert out.stop_reason is StopReason.TIME_BUDGET and out.command_s == 6
    granted = [message.step_timeout_s for message in world.sandbox.ran if message.op_id != "agent"]
    assert granted == [5, 2]


async def test_a_sandbox_that_is_lost_is_infrastructures_failure_and_final(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    def says(command: str) -> ActOutput:
        raise SandboxError("the host is gone", retryable=False)

    world.sandbox.says = says
    with pytest.raises(SandboxError, match="the host is gone") as caught:
        await run(world, endpoint, world.message(f"{PROGRAM} 9 ls"))
    assert not caught.value.retryable


async def test_a_command_is_asked_for_again_under_its_key_while_the_daemon_is_away(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.agents.session.FIRST_PAUSE_S", 0.01)
    answered = world.sandbox.says

    def says(command: str) -> ActOutput:
        world.sandbox.says = answered
        raise SandboxError("the daemon does not answer")

    world.sandbox.says = says
    out = await run(world, endpoint, world.message(f"{PROGRAM} 1 ls"))
    assert out.stop_reason is StopReason.FINISHED
    assert [message.op_id for message in world.sandbox.ran] == ["agent", "x1", "x1"]


async def test_an_engine_that_is_lost_is_infrastructures_failure_and_final(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.agents.session.TRIES", 1)
    world.engine.fail["/inference/v1/generate"] = 503
    with pytest.raises(EngineError) as caught:
        await run(world, endpoint, world.message(f"{PROGRAM} 1; sleep 60"))
    assert not caught.value.retryable


async def test_a_try_after_a_lost_worker_does_not_start_the_program_again(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    """The sandbox is not what it was: that attempt is infrastructure's loss, and another one begins afresh."""
    await run(world, endpoint, world.message(f"{PROGRAM} 1 ls"))
    with pytest.raises(ApplicationError) as caught:
        await run(world, endpoint, world.message(f"{PROGRAM} 1 ls"))
    assert (caught.value.type, caught.value.non_retryable) == (FailureType.WORKER, True)
    assert world.sandbox.commands == ["ls"]


async def test_a_sandbox_of_another_host_is_handed_back_before_anything_began(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.sandbox.fails = [SandboxError("it lives elsewhere")]
    with pytest.raises(SandboxError) as caught:
        await ActivityEnvironment().run(world.activities(endpoint).run_agent, world.message(f"{PROGRAM} 1"))
    assert caught.value.retryable and not world.spool.exists()


async def test_nothing_of_a_program_is_left_when_its_attempt_is_cancelled(
    world: AgentWorld, endpoint: AgentEndpoint, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $! $$ > {pids}; {PROGRAM} 1; wait"
    running = asyncio.create_task(run(world, endpoint, world.message(command)))
    async with asyncio.timeout(20):
        while not world.made or not pids.is_file():
            await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(pids)


async def test_nothing_of_a_program_is_left_when_its_worker_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    launcher = Path(__file__).parents[2] / "activities" / "agents" / "launcher.py"
    command = f"sleep 600 & echo $! $$ > {pids}; wait"
    words = [sys.executable, "-S", "-E", str(launcher)]
    worker = f"import os, subprocess; subprocess.run([*{words!r}, str(os.getpid()), {command!r}])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", worker)
    async with asyncio.timeout(20):
        while not pids.is_file() or not pids.read_text().endswith("\n"):
            await asyncio.sleep(0.05)
    process.kill()
    await process.wait()
    await gone(pids)


async def gone(pids: Path) -> None:
    """No process of these any more, but one that its parent has not looked at."""
    async with asyncio.timeout(10):
        while any(_alive(int(pid)) for pid in pids.read_text().split()):
            await asyncio.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_a_worker_that_shuts_down_gives_the_attempt_back_as_its_own_loss(
    world: AgentWorld, endpoint: AgentEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.agents.activities.activity.is_worker_shutdown", lambda: True)
    running: asyncio.Task[Any] = asyncio.create_task(run(world, endpoint, world.message(f"{PROGRAM} 1; sleep 60")))
    async with asyncio.timeout(20):
        while not world.made:
            await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(ApplicationError) as caught:
        await running
    assert caught.value.type == FailureType.WORKER
    assert os.listdir(world.spool) == []


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("sandbox 'ls -l | wc'", "ls -l | wc"),
        ("sandbox ls 'a b'", "ls 'a b'"),
        ("sandbox -c 'ls -l'", "ls -l"),
        ("sandbox -lc 'ls -l'", "ls -l"),
        ("echo 'ls -l' | sandbox", "ls -l\n"),
        ("docker exec -w /work -e A=b -e 'C=d e' x bash -lc 'ls -l'", "cd /work && env A=b 'C=d e' bash -lc 'ls -l'"),
        ("docker exec -it --workdir=/ x ls", "cd / && ls"),
        ('"$RATCHET_DOCKER" exec x ls', "ls"),
    ],
)
async def test_programs_reach_the_sandbox_as_a_shell_and_as_docker_would(
    line: str, command: str, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.sandbox.says = lambda _: ActOutput(exit_code=5, output="out\n")
    await run(world, endpoint, world.message(f'{PROGRAM} 1; {line}; echo "code $?"'))
    assert world.sandbox.commands == [command]
    assert world.store.get(output_key("r", ATTEMPT)).decode() == "out\ncode 5\n"


@pytest.mark.parametrize(
    ("out", "printed"),
    [
        (ActOutput(exit_code=None, signal=9), "code 137\n"),
        (ActOutput(exit_code=None, timed_out=True, command_s=4.0), "\n(timed out after 4 s)\ncode 124\n"),
    ],
)
async def test_programs_see_how_a_command_ended(
    out: ActOutput, printed: str, world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    world.sandbox.says = lambda _: out
    await run(world, endpoint, world.message(f"{PROGRAM} 1; sandbox make; echo code $?"))
    assert world.store.get(output_key("r", ATTEMPT)).decode() == printed


async def test_a_made_up_container_is_named_and_nothing_else_of_docker_is_there(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    lines = "docker run -d --rm x sleep 2h; docker stop ratchet-sandbox; docker build .; echo $?"
    await run(world, endpoint, world.message(f"{PROGRAM} 1; {lines}"))
    printed = world.store.get(output_key("r", ATTEMPT)).decode().splitlines()
    assert printed == ["ratchet-sandbox", "docker build: here is one sandbox, for `docker exec`", "2"]
    assert world.sandbox.commands == []


async def test_what_a_killed_worker_left_on_the_disk_goes_with_the_next_program(
    world: AgentWorld, endpoint: AgentEndpoint
) -> None:
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    (world.spool / f"{dead.pid}-left").mkdir(parents=True)
    await run(world, endpoint, world.message(f"{PROGRAM} 1"))


@pytest.mark.parametrize("letter", ["x", "\\001", "\\342\\202\\254"])
async def test_an_answer_of_any_length_is_reported(letter: str, world: AgentWorld, endpoint: AgentEndpoint) -> None:
    """Cut: a report that no message holds would be a way out of the verdict."""
    write = f"for i in $(seq 1000); do printf '{letter * 100}'; done > $RATCHET_ANSWER_FILE"
    out = await run(world, endpoint, world.message(f"{PROGRAM} 8; {write}"))
    assert out.stop_reason is StopReason.FINISHED and len(out.turns) == 8
    assert 1000 < len(out.answer) < 65_536
    data_converter.payload_converter.to_payloads([out])
