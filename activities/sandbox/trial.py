"""Tries a task out before anybody trains on it: is it fit to teach?

Owns the questions. Can its image be made? Is doing nothing worth less than full reward? Does its oracle reach it? Does
the verifier say the same twice? Does any of it take most of its time? Real sandboxes, the workflows' own code, no
network, nothing left behind. Called by `ratchet tasks check`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from pydantic import BaseModel, computed_field

from activities.sandbox.channel import Operation
from activities.sandbox.docker import DockerBackend
from activities.sandbox.machines.facts import settings
from activities.sandbox.machines.grading import Answer
from activities.sandbox.machines.machines import Machines, unmeasured
from activities.sandbox.machines.verdict import MachineJudge
from activities.sandbox.preparation import Preparation
from activities.sandbox.verification import CHECK_S, ORACLE_S, Run, Verdict, describe, judge
from tasksets.base import Task
from workflows.errors import RatchetError, VerifierBrokenByAnswer

log = logging.getLogger(__name__)

KIND = "check"
SLOW = 0.5
"""Share of its limit from which a phase is slow: on a busier machine it would not end in time."""


class Unfit(StrEnum):
    UNSUPPORTED = "unsupported"
    """Its format asks for something that Ratchet has not."""
    BROKEN = "broken"
    """Its image can't be made, its verifier gives no answer, or its oracle does not reach full reward."""
    FLAKY = "flaky"
    """Its verifier says one thing and then another of the same answer."""
    TRIVIAL = "trivial"
    """Doing nothing is worth full reward."""
    SLOW = "slow"
    """A phase takes most of its time."""


class Finding(BaseModel):
    what: Unfit
    why: str


class Checked(BaseModel):
    """What came out of one task. Rewards are None where it did not come that far; seconds are of the phase itself."""

    task: str
    format: str
    findings: list[Finding] = []
    nothing: float | None = None
    """What doing nothing is worth."""
    oracle: float | None = None
    again: float | None = None
    """The oracle's answer, graded once more."""
    image_s: float | None = None
    oracle_s: float | None = None
    verify_s: float | None = None
    expected_tests: int = 0
    local_bases: list[str] = []
    """Base images for which a Debian made here stood in."""
    notes: list[str] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fit(self) -> bool:
        return not self.findings


@dataclass
class _Notes:
    checked: Checked

    def find(self, what: Unfit, why: str) -> None:
        if what not in {finding.what for finding in self.checked.findings}:
            self.checked.findings.append(Finding(what=what, why=" ".join(why.split())[:600]))


Show = Callable[[str, str], None]
"""Gets (task, phase) as a task goes on."""


class Trial:
    """Of one taskset, in one run of the command."""

    def __init__(self, backend: DockerBackend) -> None:
        self._backend = backend
        self._machines = Machines(backend)
        self._preparation = Preparation(backend, self._machines)
        self._judge = MachineJudge(backend, self._machines)
        self.run = f"check-{uuid.uuid4().hex[:12]}"
        """Of the labels of all its sandboxes."""

    async def check(self, task: Task, number: int, show: Show) -> Checked:
        """`number` tells the tasks of the run apart. Raises nothing that is the task's fault, SandboxError where the
        daemon is away."""
        first = ""
        while True:
            notes = _Notes(_unchecked(task))
            try:
                await self._check(task, number, notes, partial(show, task.id))
            except RatchetError as error:
                if error.retryable and not first:
                    first = str(error)
                    continue
                if error.retryable:
                    # It is the task's where the daemon answers; the first words tell more than those of the retry.
                    await self._backend.daemon.call("info", lambda client: client.system.info())
                notes.find(Unfit.BROKEN, first if error.retryable else str(error))
            except Exception as error:
                # Our own fault, and no reason to lose what was found of the others.
                log.exception("%s could not be checked", task.id)
                notes.find(Unfit.BROKEN, f"it could not be checked, which is our own fault: {error!r}")
            return notes.checked

    async def _check(self, task: Task, number: int, notes: _Notes, show: Callable[[str], None]) -> None:
        await self._image(task, notes, show)
        if notes.checked.findings and notes.checked.findings[0].what is Unfit.UNSUPPORTED:
            return
        show("doing nothing")
        async with self._playing(task, f"{self.run}/g{number}/e0/a0") as play:
            await self._weigh_nothing(play, notes)
        if not (task.oracle or task.oracle_answer):
            notes.find(Unfit.BROKEN, "there is no solution: nothing shows that it can be solved")
            return
        show("the oracle")
        async with self._playing(task, f"{self.run}/g{number}/e1/a0") as play:
            await self._weigh_oracle(play, notes, show)

    async def _image(self, task: Task, notes: _Notes, show: Callable[[str], None]) -> None:
        if task.machine is None:
            return
        show("its image")
        began = time.monotonic()
        images = await self._machines.images(task)
        notes.checked.image_s = round(time.monotonic() - began, 2)
        notes.checked.local_bases = sorted({name for image in images for name in image.local_bases})
        for image in images:
            if why := unmeasured(settings(await self._machines.inspect(image.id))["volumes"]):
                notes.find(Unfit.UNSUPPORTED, why)
        _weigh_time(notes, "the build of its image", notes.checked.image_s, task.machine.image.timeout_s)

    async def _weigh_nothing(self, play: _Play, notes: _Notes) -> None:
        verdict = await self._graded(play, "", notes, 1)
        if verdict is None:
            return
        notes.checked.nothing = verdict.reward
        if verdict.passed:
            notes.find(Unfit.TRIVIAL, f"doing nothing gets full reward ({verdict.detail})")
        again = await self._graded(play, "", notes, 4)
        if again is not None and again.reward != verdict.reward:
            words = f"doing nothing is worth {verdict.reward:g} and then {again.reward:g}"
            notes.find(Unfit.FLAKY, f"{words} ({again.detail})")

    async def _weigh_oracle(self, play: _Play, notes: _Notes, show: Callable[[str], None]) -> None:
        task, checked = play.task, notes.checked
        began = time.monotonic()
        failed = await self._solve(play)
        checked.oracle_s = round(time.monotonic() - began, 2)
        limit = (task.machine.agent_timeout_s if task.machine else ORACLE_S * max(len(task.oracle), 1)) or 0.0
        _weigh_time(notes, "its oracle", checked.oracle_s, limit)
        show("the verifier")
        verdict = await self._graded(play, task.oracle_answer, notes, 1)
        if verdict is None:
            return
        checked.oracle, checked.verify_s = verdict.reward, round(verdict.seconds, 2)
        grading_s = task.machine.grading.timeout_s if task.machine else CHECK_S
        _weigh_time(notes, "its verifier", checked.verify_s, grading_s)
        show("the verifier again")
        again = await self._graded(play, task.oracle_answer, notes, 4)
        if again is not None:
            checked.again = again.reward
            if again.reward != verdict.reward:
                words = f"the oracle's answer is worth {verdict.reward:g} and then {again.reward:g}"
                notes.find(Unfit.FLAKY, f"{words} ({again.detail})")
        if not verdict.passed:
            why = f"its oracle gets {verdict.reward:g} ({verdict.detail})"
            notes.find(Unfit.BROKEN, why + (f"; a command of it failed: {failed}" if failed else ""))

    async def _graded(self, play: _Play, answer: str, notes: _Notes, first: int) -> Verdict | None:
        """None where the verifier gives no answer on this one."""
        try:
            if play.task.machine is not None:
                labels = play.labels | {"kind": f"{KIND}-grader"}
                given = Answer(play.sandbox_id, play.image_id, labels)
                return await self._judge.judge(play.task, given, first=first)
            await self._backend.kill_agent(play.sandbox_id)
            run = self._preparation.run_in(play.task, play.sandbox_id)
            return await judge(play.task, answer, run, partial(self._fresh, play), first=first)
        except VerifierBrokenByAnswer as broken:
            if play.solved:
                notes.find(Unfit.FLAKY, f"the oracle's answer broke the verifier, and then did not: {broken}")
            return None

    async def _solve(self, play: _Play) -> str:
        """Run the oracle; how the first command failed, empty where none did."""
        play.solved = True
        if play.task.machine is not None:
            return await self._judge.run_oracle(play.task, play.sandbox_id)
        failed = ""
        for turn, command in enumerate(play.task.oracle):
            op = Operation(op_id=f"act-t{turn}", command=command, timeout_s=ORACLE_S)
            result = await self._backend.run(play.sandbox_id, op)
            if result.exit_code != 0 and not failed:
                failed = f"{describe(result)}: {(result.tail or result.head).decode(errors='replace')[-200:]}"
        return failed

    @asynccontextmanager
    async def _playing(self, task: Task, attempt: str, kind: str = KIND) -> AsyncIterator[_Play]:
        """A prepared sandbox, gone afterwards."""
        labels = {"kind": kind, "run": self.run, "attempt": attempt, "task": task.id}
        sandbox_id = self._backend.id_of(attempt, kind)
        try:
            sandbox = await self._backend.acquire(await self._machines.spec(task), labels)
            await self._preparation.prepare(task, sandbox)
            yield _Play(task, sandbox_id, sandbox.image_id, labels)
        finally:
            await self._backend.close(sandbox_id)

    @asynccontextmanager
    async def _fresh(self, play: _Play) -> AsyncIterator[Run]:
        async with self._playing(play.task, play.labels["attempt"], f"{KIND}-proof") as proof:
            yield self._preparation.run_in(play.task, proof.sandbox_id)


@dataclass
class _Play:
    task: Task
    sandbox_id: str
    image_id: str
    labels: dict[str, str]
    solved: bool = False


def _unchecked(task: Task) -> Checked:
    return Checked(
        task=task.id,
        format=task.machine.format if task.machine else "native",
        expected_tests=len(task.expected_tests),
        notes=task.notes,
    )


def _weigh_time(notes: _Notes, what: str, seconds: float, limit_s: float) -> None:
    if limit_s and seconds > SLOW * limit_s:
        notes.find(Unfit.SLOW, f"{what} takes {seconds:.1f} s of {limit_s:.0f} s; more than half of its time")


def unsupported(task_id: str, reasons: list[str]) -> Checked:
    """The result of a task that its reader could not take."""
    return Checked(task=task_id, format="", findings=[Finding(what=Unfit.UNSUPPORTED, why="; ".join(reasons))])
