"""Grades what an agent left in its machine, out of the agent's reach.

Owns the order of things. The machine is stopped from outside. What changed in it is weighed, and tampering ends it
there. Then the verifier runs in a fresh machine that no agent saw: of the state that was left, without what is not
carried over, or of the pristine image with the declared artifacts. Tests, runner and tools are mounted read-only, the
environment is the image's and the task's, there is no network but the task's services, as the agent left
them, and what the verifier writes lies on the host. When it is over, all processes are killed before anything is read.
Called by `judge_machine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from activities.sandbox.channel import Operation, Person
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import Blame, SandboxGone
from activities.sandbox.machines import inspection
from activities.sandbox.machines.changes import Review, moved, review, within
from activities.sandbox.machines.facts import ImageFacts
from activities.sandbox.machines.kit import INSIDE as KIT
from activities.sandbox.machines.kit import Kits, kit_environment, script_of
from activities.sandbox.machines.machines import MODULE, Machines, environments, python_path, started_words
from activities.sandbox.machines.plugin.ratchet_report import SAFE
from activities.sandbox.machines.report import read_bounded
from activities.sandbox.machines.reward import FULL, Found, find_reward
from activities.sandbox.machines.room import Room, mount_points, opened
from activities.sandbox.machines.state import FOLDER, State, TooMuch, fingerprint, relocated
from activities.sandbox.text import readable
from activities.sandbox.verification import Look, ServiceFailed, describe
from tasksets.base import Artifact, Machine, Task
from tasksets.reading import TESTS
from workflows.errors import SandboxError, VerifierError

CAP_BYTES = 1 << 20
REWARD_BYTES = 64 << 10
REWARDS = ("reward.json", "reward.txt")
SUSPECTS = 400
"""Trusted paths that are compared one by one; who changed more changed the machine."""


@dataclass(frozen=True)
class Answer:
    """A machine that an agent is done with. `labels` are for those that grade it: attempt, run, task and kind."""

    sandbox_id: str
    image_id: str
    labels: dict[str, str]
    runtime: str = ""
    """Of the machines that grade it, as of its own."""


@dataclass(frozen=True)
class Graded:
    """`found.reward` None: the verifier gave no answer. `said` is the end of its output, `seconds` what it took."""

    found: Found
    said: str = ""
    seconds: float = 0.0
    evidence: dict[str, str] | None = None


LookAt = Callable[[Sandbox], Look]
"""Who finds out whose doing something in that sandbox was."""


class Examiner:
    def __init__(self, backend: DockerBackend, machines: Machines) -> None:
        self._backend = backend
        self._machines = machines
        self._kits = Kits(backend.state / "kits")

    async def examine(self, task: Task, answer: Answer, look_at: LookAt, number: int) -> Graded:
        """Grade an answer; `number` tells one try from another. Raises SandboxError, and what looking raises."""
        machine = task.machine
        assert machine is not None
        state = State(self._backend.daemon, self._backend.boxes, answer.sandbox_id)
        await state.halt()
        facts = self._machines.known(answer.image_id)
        weighed = await self._weigh(state, machine, facts)
        if weighed.tampered:
            return _tampered(weighed.tampered)
        try:
            await self._machines.services.look(task, answer.sandbox_id)
        except ServiceFailed as failed:
            return Graded(Found(None, str(failed)), evidence=failed.evidence)
        try:
            async with self._room(task, answer, state, number) as room:
                return await self._ask(task, state, room, weighed, facts, look_at(room.sandbox))
        except SandboxGone as gone:
            if not gone.by_agent:
                raise VerifierError(f"the grading machine of {task.id}: {gone}", evidence=gone.evidence) from gone
            return Graded(Found(None, f"the grading machine: {gone}"), evidence=gone.evidence)
        except TooMuch as much:
            return Graded(Found(None, str(much)))

    # --- weighing ---------------------------------------------------------------------------------------------------

    async def _weigh(self, state: State, machine: Machine, facts: ImageFacts) -> Review:
        grading = machine.grading
        if grading.artifacts is not None:
            return await self._weigh_artifacts(state, machine, facts, grading.artifacts)
        weighed = await asyncio.to_thread(
            review,
            await state.changes(),
            facts.model_copy(update={"workdir": machine.workdir or facts.workdir}),
            mounts=mount_points(grading),
            may_change=grading.may_change,
            starts=started_words(machine, facts),
            ahead=python_path(machine, facts),
            left=environments(machine, facts),
        )
        for path in weighed.folders:
            if not await state.is_folder(path):
                weighed.tampered.append(f"{path} is no folder any more")
        for path in weighed.links:
            if await state.is_link(path):
                weighed.tampered.append(f"{path} is a link in the place of a module")
        weighed.tampered += await self._compared(state, weighed.suspects)
        return weighed

    async def _weigh_artifacts(
        self, state: State, machine: Machine, facts: ImageFacts, artifacts: list[Artifact]
    ) -> Review:
        """Nothing but these leaves the machine: what else happened there is of no account."""
        if machine.grading.image is not None:
            return Review()
        workdir = PurePosixPath(machine.workdir or facts.workdir)
        places = {
            str(workdir / artifact.source): str(workdir / (artifact.destination or artifact.source))
            for artifact in artifacts
        }
        weighed = await asyncio.to_thread(
            review,
            moved(await state.changes(), places),
            facts.model_copy(update={"workdir": str(workdir)}),
            mounts=mount_points(machine.grading),
            may_change=machine.grading.may_change,
            starts=started_words(machine, facts),
            ahead=python_path(machine, facts),
        )
        suspects = [path for path in weighed.suspects if any(within(path, source) for source in places)]
        return Review(tampered=weighed.tampered + await self._compared(state, suspects), look=weighed.look)

    async def _compared(self, state: State, suspects: list[str]) -> list[str]:
        """Which of the trusted paths are not what the image has, in words."""
        if len(suspects) > SUSPECTS:
            return [f"{len(suspects)} trusted files changed, such as {suspects[0]}"]
        if not suspects:
            return []
        async with state.pristine() as pristine:
            return [words for path in suspects if (words := await _difference(pristine, state, path))]

    # --- the grading machine ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _room(self, task: Task, answer: Answer, state: State, number: int) -> AsyncIterator[Room]:
        machine = task.machine
        assert machine is not None
        grading, labels = machine.grading, answer.labels | {"generation": str(number)}
        kit = await self._kits.kit(grading)
        if grading.artifacts is not None:
            image = (await self._machines.image(grading.image)).id if grading.image else answer.image_id
            spec = replace(await self._machines.grading_spec(task, answer.sandbox_id, image), runtime=answer.runtime)
            async with opened(self._backend, grading, spec, labels, kit) as room:
                yield room
            return
        try:
            kept = await state.keep()
            spec = replace(await self._machines.grading_spec(task, answer.sandbox_id, kept), runtime=answer.runtime)
            async with opened(self._backend, grading, spec, labels, kit) as room:
                yield room
        finally:
            await state.forget()

    async def _ask(
        self, task: Task, state: State, room: Room, weighed: Review, facts: ImageFacts, look: Look
    ) -> Graded:
        machine, sandbox_id = task.machine, room.sandbox.id
        assert machine is not None
        grading = machine.grading
        if grading.image:
            facts = await self._machines.facts(room.sandbox)
        links = await self._carry(machine, state, room, weighed, facts)
        inspection.lay_out(room.report.runner, weighed, links)
        kept = [TESTS, grading.logs, "/run/ratchet"]
        seen = await self._backend.run(
            sandbox_id, inspection.inspect_operation(kept, deep=grading.artifacts is not None)
        )
        wrong = inspection.read_inspection(seen)
        if wrong is None:
            return Graded(Found(None, f"what is carried over can't be looked at: {describe(seen)}"))
        if wrong:
            return _tampered(wrong)
        await self._restore(state, room, weighed.restored)
        try:
            await self._machines.start(sandbox_id, machine, facts)
        except SandboxGone:
            raise
        except SandboxError as error:
            if error.retryable:
                raise
            return Graded(Found(None, f"in the grading machine {error}"))
        op = Operation(
            op_id="verify",
            command=grading.command,
            timeout_s=grading.timeout_s,
            cap_bytes=CAP_BYTES,
            person=self._person(machine, facts, room),
        )
        return await self._verify(task, room, op, look)

    async def _verify(self, task: Task, room: Room, op: Operation, look: Look) -> Graded:
        machine = task.machine
        assert machine is not None
        storage = room.storage(self._backend, machine.storage_mb)
        async with storage.watched():
            result = await self._backend.run(room.sandbox.id, op)
        try:
            await self._backend.kill_agent(room.sandbox.id)
        except SandboxError:
            # Whoever is root there may be in the way of that; from outside nobody is.
            await State(self._backend.daemon, self._backend.boxes, room.sandbox.id).halt()
        if full := await storage.full():
            return Graded(Found(None, f"the grading machine: {full}"), evidence={"sign": full, "blame": Blame.AGENT})
        if result.exit_code is None:
            found = Found(None, f"the verifier {describe(result)}")
        else:
            files = {name: read_bounded(room.logs / name, REWARD_BYTES) for name in REWARDS}
            reported = await asyncio.to_thread(room.report.read)
            grading = machine.grading
            found = find_reward(grading.reads, result, files, reported, task.expected_tests, grading.rewards)
        evidence = {} if (found.reward or 0) >= FULL else await look(op, result)
        said = readable(result.tail or result.head)[-2000:]
        return Graded(found, said, result.seconds, evidence)

    async def _carry(self, machine: Machine, state: State, room: Room, weighed: Review, facts: ImageFacts) -> list[str]:
        """Bring what is not in the image of the grading machine; the paths that are to be looked at for links."""
        grading = machine.grading
        target = State(self._backend.daemon, self._backend.boxes, room.sandbox.id)
        workdir = PurePosixPath(machine.workdir or facts.workdir)
        for artifact in grading.artifacts or []:
            source = str(workdir / artifact.source)
            archive = await state.archive(source)
            if archive is not None:
                await target.put("/", await _relocated(archive, str(workdir / (artifact.destination or source))))
        if grading.artifacts is None:
            return weighed.carried
        return [str(workdir / (artifact.destination or artifact.source)) for artifact in grading.artifacts]

    async def _restore(self, state: State, room: Room, paths: list[str]) -> None:
        """Write what the image has at these paths, where nothing is any more."""
        if not paths:
            return
        target = State(self._backend.daemon, self._backend.boxes, room.sandbox.id)
        async with state.pristine() as pristine:
            for path in paths:
                archive = await pristine.archive(path)
                if archive is not None:
                    await target.put("/", await _relocated(archive, path))

    def _person(self, machine: Machine, facts: ImageFacts, room: Room) -> Person:
        grading = machine.grading
        workdir = "" if grading.image else machine.workdir
        person = facts.person(grading.user, machine.env | grading.env, workdir)
        env = person.env | room.report.environment(person.env)
        if room.kit:
            env |= kit_environment() | {"PATH": f"{KIT}/bin:{env['PATH']}"}
            if f"{machine.workdir or facts.workdir}/.venv" not in environments(machine, facts):
                # The image's, weighed like all of it, and what is installed there can't be had elsewhere.
                del env["UV_PROJECT_ENVIRONMENT"]
        if MODULE.search(script_of(grading)):
            env |= {"PYTHONSAFEPATH": SAFE}
        return replace(person, env=env)


async def _relocated(archive: bytes, path: str) -> bytes:
    """In a thread: of a folder with many files it takes a while, and other attempts are at work here."""
    return await asyncio.to_thread(relocated, archive, path)


async def _difference(before: State, after: State, path: str) -> str:
    """How a trusted path is not what it was, in words; empty where it is."""
    first, last = await before.look(path), await after.look(path)
    if first.mode & last.mode & FOLDER:
        return ""
    if not last.there and first.there:
        return f"{path} is gone"
    if first.mode != last.mode or (first.is_file and first.size != last.size):
        return f"{path} is not what it was"
    try:
        was, now = await before.archive(path), await after.archive(path)
    except TooMuch as much:
        return f"{much}: it can't be compared"
    if fingerprint(was) == fingerprint(now):
        return ""
    return f"{path} is {'gone' if now is None else 'not what it was'}"


def _tampered(reasons: list[str]) -> Graded:
    more = len(reasons) - 5
    words = "; ".join([*reasons[:5], *([f"and {more} more"] if more > 0 else [])])
    return Graded(Found(0.0, words, tampered=True))
