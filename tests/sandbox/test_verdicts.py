"""Whose doing a check or a digest without an answer is: fakes for sandbox and host, then real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from activities.sandbox.channel import Operation, Result
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone
from activities.sandbox.tampering import digest_operation
from activities.sandbox.verification import Verdict, judge
from tasksets.base import Task
from tests.sandbox.conftest import Box, docker
from tests.sandbox.test_activities import Episode, activities, episode
from tests.sandbox.test_blame import Stalled
from tests.sandbox.test_rules import result
from workflows.errors import SandboxError, Undetermined, VerifierBrokenByAnswer, VerifierError

__all__ = ["activities", "episode"]
TASK = Task(id="t", kind="k", instruction="", setup="", check="", protected=["/work/tests"])
TIMED_OUT: dict[str, Any] = {"exit_code": None, "timed_out": True}
BEFORE = {"protected-before": result(b"abc  -\n")}
AFTER = {"protected-after": result(b"abc  -\n"), "check-1": result(exit_code=1)}


class Attempt:
    """A sandbox that answers by key, and an inquest that notes what it was asked about."""

    def __init__(self, answers: dict[str, Result], finds: Exception | None = None) -> None:
        self.answers, self.finds = BEFORE | AFTER | answers, finds
        self.looked: list[str] = []

    async def judge(self) -> Verdict:
        return await judge(TASK, "", self._run, self._known_good, self._look)

    async def _run(self, op: Operation) -> Result:
        return self.answers[op.op_id]

    async def _look(self, op: Operation, _: Result) -> dict[str, str]:
        self.looked.append(op.op_id)
        if self.finds:
            raise self.finds
        return {"blame": "agent"}

    @asynccontextmanager
    async def _known_good(self) -> AsyncIterator[Any]:
        async def fresh(_: Operation) -> Result:
            return result()

        yield fresh


NO_DIGEST = [
    TIMED_OUT,
    {"head": b"half a listing", "oom_kills": 1},
    {"exit_code": None, "spawn_errno": 11},
    {"exit_code": None, "signal": 9},
]
NOT_THE_AGENTS = [SandboxGone("stalled", evidence={"blame": "host"}), Undetermined("contradictory")]


@pytest.mark.parametrize("fields", NO_DIGEST)
@pytest.mark.parametrize("finds", NOT_THE_AGENTS)
async def test_a_digest_that_the_host_kept_from_being_taken_is_no_tampering(
    fields: dict[str, Any], finds: Exception
) -> None:
    lost = result(**fields)
    with pytest.raises(type(finds)):
        await Attempt({"protected-after": lost, "protected-after-again": lost}, finds).judge()


@pytest.mark.parametrize("fields", NO_DIGEST)
async def test_a_digest_that_the_agent_kept_from_being_taken_is_the_models_failure(fields: dict[str, Any]) -> None:
    lost = result(**fields)
    attempt = Attempt({"protected-after": lost, "protected-after-again": lost})
    with pytest.raises(VerifierBrokenByAnswer, match="digest of the protected files") as broken:
        await attempt.judge()
    assert broken.value.evidence["blame"] == "agent"
    assert attempt.looked == ["protected-after", "protected-after-again"]


async def test_a_digest_is_taken_once_more_before_anybody_is_asked() -> None:
    attempt = Attempt({"protected-after": result(**TIMED_OUT), "protected-after-again": result(b"abc  -\n")})
    assert not (await attempt.judge()).tampered
    attempt.answers["protected-after-again"] = result(b"another  -\n")
    assert (await attempt.judge()).tampered


@pytest.mark.parametrize("finds", NOT_THE_AGENTS)
async def test_a_check_that_the_host_broke_twice_is_not_the_models_failure_though_the_proof_passes(
    finds: Exception,
) -> None:
    attempt = Attempt({"check-1": result(**TIMED_OUT), "check-2": result(**TIMED_OUT)}, finds)
    with pytest.raises(type(finds)):
        await attempt.judge()


async def test_a_check_that_the_agent_broke_is_the_models_failure_with_all_the_evidence() -> None:
    attempt = Attempt({"check-1": result(**TIMED_OUT), "check-2": result(exit_code=7)})
    with pytest.raises(VerifierBrokenByAnswer) as broken:
        await attempt.judge()
    assert broken.value.evidence == {
        "blame": "agent",
        "check on this answer": "exit 7",
        "check on a known-good answer": "exit 0",
    }
    assert attempt.looked == ["check-1", "check-2"]


async def test_a_check_that_says_no_after_the_host_killed_in_it_is_looked_into_and_one_that_says_yes_is_not() -> None:
    killed = Attempt({"check-1": result(exit_code=1, oom_kills=1)}, SandboxGone("the host's memory"))
    with pytest.raises(SandboxError):
        await killed.judge()
    passed = Attempt({"check-1": result(oom_kills=1)})
    assert (await passed.judge()).passed and passed.looked == []


@pytest.mark.docker
async def test_a_stall_of_the_host_while_a_check_hangs_is_infrastructure(
    episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.sandbox.verification.CHECK_S", 0.5)
    await episode.act("mkfifo out")
    monkeypatch.setattr(episode.activities._inquest, "_host", Stalled())
    with pytest.raises(SandboxError, match="stalls for memory") as lost:
        await episode.verify()
    assert lost.value.evidence["blame"] == "host"


@pytest.mark.docker
@pytest.mark.parametrize("by_agent", [False, True])
async def test_a_proofs_sandbox_that_dies_is_the_verifiers_loss_and_not_the_agents(
    episode: Episode, backend: DockerBackend, monkeypatch: pytest.MonkeyPatch, by_agent: bool
) -> None:
    await episode.act("touch broken")
    proof, run = backend.id_of(episode.attempt, "verifier"), backend.run

    async def dying(sandbox_id: str, op: Operation) -> Result:
        if sandbox_id != proof:
            return await run(sandbox_id, op)
        if by_agent:
            raise SandboxGone("it ran out of memory", by_agent=True)
        docker(backend._daemon.docker_host, "rm", "-f", proof)
        return await run(sandbox_id, op)

    monkeypatch.setattr(backend, "run", dying)
    with pytest.raises(VerifierError, match="the sandbox of the proof") as lost:
        await episode.verify()
    assert lost.value.retryable is not by_agent


@pytest.mark.docker
async def test_the_death_of_the_attempts_own_sandbox_by_its_memory_is_still_the_agents(
    episode: Episode, backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = backend.run

    async def dead(sandbox_id: str, op: Operation) -> Result:
        if sandbox_id != episode.lease.sandbox_id:
            return await run(sandbox_id, op)
        raise SandboxGone("it ran out of memory", by_agent=True)

    monkeypatch.setattr(backend, "run", dead)
    with pytest.raises(VerifierBrokenByAnswer, match="no check is possible") as broken:
        await episode.verify()
    assert broken.value.evidence["blame"] == "agent"


async def digest(box: Box, when: str) -> bytes:
    taken = await box.backend.run(box.id, digest_operation(TASK, when=when))
    assert (taken.exit_code, taken.timed_out) == (0, False)
    return taken.head


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "echo b > one",
        "chmod 700 one",
        "mv one three",
        "mkfifo pipe",
        "truncate -s 1000000000000 sparse",
        "ln -s /dev/zero endless",
        "ln -s .. around",
        "ln -sf two link; ln -sf one other",
        "rm one; ln -s /proc/1/fd/0 one",
        "seq 400 | while read n; do echo > $n; done",
    ],
)
async def test_a_change_in_protected_files_shows_in_their_digest_and_never_hangs_it(box: Box, command: str) -> None:
    await box("mkdir tests; cd tests; echo a > one; echo a > two; ln -s one link; ln -s two other")
    before = await digest(box, "before")
    assert await digest(box, "untouched") == before
    assert (await box(f"cd tests && {command}")).exit_code == 0
    assert await digest(box, "after") != before


@pytest.mark.docker
async def test_many_protected_files_cost_a_handful_of_processes(box: Box) -> None:
    await box("mkdir tests; cd tests; seq 3000 | while read n; do echo > $n; done", timeout_s=30)
    op = digest_operation(TASK, when="before")
    assert (await box.backend.run(box.id, op)).seconds < 3
