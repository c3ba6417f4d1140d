"""Machines of tasks before the agent: the image, the limits, and all that is to be there when it begins.

Owns the preparation, which is done once per container whoever retries, and the note of who the agent is there, which
lies in the sandbox's folder on the host. Called by `SandboxActivities`, `Examiner` and `ratchet tasks check`.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import PurePosixPath
from typing import Any

from activities.sandbox.channel import INSIDE as CLOSED
from activities.sandbox.channel import Operation, Person
from activities.sandbox.container import SandboxSpec
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.machines.changes import within
from activities.sandbox.machines.facts import ImageFacts, KnownImages, facts_of, listing, settings
from activities.sandbox.machines.images import TaskImage, TaskImages
from activities.sandbox.machines.kit import script_of
from activities.sandbox.machines.storage import Storage
from activities.sandbox.services import PERSON, Services, healthy
from tasksets.base import ImageSource, Machine, Service, Task
from workflows.errors import SandboxError

STORAGE = "ratchet.storage-mb"
MODULE = re.compile(r"\s-\w*m\s*(pytest|py\.test)\b")
"""How a script runs pytest from the working folder, into which Python looks first."""
UV = re.compile(r"\buvx?\s")
PREPARE_S = 60.0
PROCESSES = 1024
KEEPS_ALIVE = ["sh", "-c", "sleep infinity"]
"""What an image's entrypoint is given to run where the task names nothing."""


class Machines:
    """`backend` starts them. One per process."""

    def __init__(self, backend: DockerBackend) -> None:
        self._backend = backend
        self._images = TaskImages(backend.daemon, backend.state, local_bases=backend.local_bases)
        self.services = Services(backend)
        self._cpus = 0
        self._known = KnownImages(backend.state / "image-facts-2")

    async def image(self, source: ImageSource) -> TaskImage:
        """Pulled or built where it isn't there. Raises SandboxError."""
        return await self._images.ensure(source)

    async def spec(self, task: Task) -> SandboxSpec:
        """What to start for a task, native or not. Raises SandboxError."""
        binds = self.services.binds(task)
        if task.machine is None:
            return SandboxSpec(image=task.image, binds=binds)
        images = await self.images(task)
        for image in images:
            if why := unmeasured(settings(await self.inspect(image.id))["volumes"]):
                raise SandboxError(f"{task.id}: {why}", retryable=False)
        return replace(await self.machine_spec(task.machine, images[0].id), binds=binds)

    async def images(self, task: Task) -> list[TaskImage]:
        """Of a task with a machine and of its services, each made where it isn't there. Raises SandboxError."""
        assert task.machine is not None
        sources = [task.machine.image, *(service.image.source for service in task.services if service.image)]
        return [await self.image(source) for source in sources]

    async def grading_spec(self, task: Task, sandbox_id: str, image: str) -> SandboxSpec:
        """What the machine that grades the answer in a sandbox is made from: it has the services that stand beside
        that one, as they are by now."""
        assert task.machine is not None
        spec = await self.machine_spec(task.machine, image)
        services = self._backend.boxes.services(sandbox_id)
        if not services:
            return spec
        beside = self._backend.boxes.container(next(iter(services.values())))
        return replace(spec, beside=beside, binds=self.services.binds(task))

    async def machine_spec(self, machine: Machine, image: str) -> SandboxSpec:
        """The daemon refuses more CPUs than it has."""
        return await self._limited(image, machine.memory_mb, machine.cpus)

    async def _limited(self, image: str, memory_mb: int, cpus: float) -> SandboxSpec:
        if not self._cpus:
            info = await self._backend.daemon.call("info", lambda client: client.system.info())
            self._cpus = int(info["NCPU"])
        cpus = min(cpus, self._cpus)
        return SandboxSpec(image=image, memory_mb=memory_mb, cpus=cpus, processes=PROCESSES, machine=True)

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """Make a machine ready for the agent. Raises SandboxError, final for what would fail again."""
        machine = task.machine
        assert machine is not None
        if not sandbox.recipe.sbxd:
            raise SandboxError(
                "tasks with an image of their own need gcc on the host: sbxd is not built", retryable=False
            )
        facts = await self.facts(sandbox)
        agent = facts.person(machine.user, machine.env, machine.workdir)
        await self._do(sandbox.id, _trusted("setup", folders_script(machine, agent)), f"the setup of {task.id}")
        await self.services.open(task, sandbox, self._service_spec, self._furnish)
        await self.start(sandbox.id, machine, facts)
        noted = {PERSON: json.dumps(asdict(agent)), STORAGE: str(machine.storage_mb)}
        self._backend.boxes.add_labels(sandbox.id, noted)

    async def _service_spec(self, service: Service) -> SandboxSpec:
        assert service.image is not None
        image = await self.image(service.image.source)
        return await self._limited(image.id, service.memory_mb, service.cpus)

    async def _furnish(self, service: Service, sandbox: Sandbox) -> Operation:
        image = service.image
        assert image is not None
        facts = await self.facts(sandbox)
        person = _in_any_shell(facts.person(image.user, service.env, image.workdir))
        words = [*(facts.entrypoint if image.entrypoint is None else image.entrypoint), *(image.command or [])]
        if image.command is None and image.entrypoint is None:
            words += (await self.inspect(sandbox.image_id))["Config"].get("Cmd") or []
        if not words:
            raise SandboxError("neither its image nor the compose file says what it runs", retryable=False)
        await self._do(sandbox.id, _trusted("setup", f"chmod 700 {CLOSED}"), "its setup")
        noted = {PERSON: json.dumps(asdict(person)), STORAGE: str(image.storage_mb)}
        self._backend.boxes.add_labels(sandbox.id, noted)
        command = f"{shlex.join(words)} > /dev/null 2>&1 < /dev/null &"
        return Operation(op_id="start", command=command, timeout_s=PREPARE_S, person=person)

    async def facts(self, sandbox: Sandbox) -> ImageFacts:
        """Of the image of a sandbox in which no agent began yet, or of one that is known."""
        if known := self._known.get(sandbox.image_id):
            return known
        shown = await self.inspect(sandbox.image_id)
        path = settings(shown)["env"].get("PATH", "").split(":")
        result = await self._backend.run(sandbox.id, listing([folder for folder in path if folder.startswith("/")]))
        facts = facts_of(shown, result)
        self._known.put(sandbox.image_id, facts)
        return facts

    def known(self, image_id: str) -> ImageFacts:
        """Raises SandboxError where nobody asked yet."""
        facts = self._known.get(image_id)
        if facts is None:
            raise SandboxError(f"nothing is known of the image {image_id}: no sandbox of it was prepared here")
        return facts

    async def inspect(self, image_id: str) -> dict[str, Any]:
        daemon = self._backend.daemon
        found: dict[str, Any] = await daemon.call("inspect image", lambda client: client.images.inspect(image_id))
        return found

    async def start(self, sandbox_id: str, machine: Machine, facts: ImageFacts) -> None:
        """What runs beside the agent, or the verifier: the image's entrypoint and the task's own program. Raises
        SandboxError where it does not get healthy."""
        words = [*facts.entrypoint, *(machine.start or KEEPS_ALIVE)]
        if facts.entrypoint or machine.start:
            beside = facts.person("", machine.env, machine.workdir)
            command = f"{shlex.join(words)} > /dev/null 2>&1 < /dev/null &"
            op = Operation(op_id="start", command=command, timeout_s=PREPARE_S, person=_in_any_shell(beside))
            await self._do(sandbox_id, op, "the start of the machine's own program")
        if machine.healthcheck:
            person = _in_any_shell(facts.person("", machine.env, machine.workdir))
            await self._do(sandbox_id, healthy(machine.healthcheck, person), "the health check")

    def person(self, sandbox_id: str) -> Person | None:
        """The agent of a machine; None for a native sandbox."""
        noted = self._backend.boxes.labels(sandbox_id).get(PERSON)
        return Person(**json.loads(noted)) if noted else None

    def storage(self, sandbox_id: str) -> Storage:
        """What of the host's disk the agent's machine may take, and each service beside it."""
        services = self._backend.boxes.services(sandbox_id)
        return self._storage(sandbox_id, {name: self._storage(one, {}) for name, one in services.items()})

    def _storage(self, sandbox_id: str, services: dict[str, Storage]) -> Storage:
        most_mb = int(self._backend.boxes.labels(sandbox_id).get(STORAGE, "0"))
        return Storage(self._backend, sandbox_id, most_mb, [self._backend.boxes.box(sandbox_id)], services)

    async def _do(self, sandbox_id: str, op: Operation, what: str) -> None:
        result = await self._backend.run(sandbox_id, op)
        if result.exit_code != 0:
            said = (result.tail or result.head).decode(errors="replace")[-300:].strip()
            ending = "timed out" if result.timed_out else f"exit {result.exit_code}"
            raise SandboxError(f"{what} failed: {ending}: {said}", retryable=False)


def unmeasured(volumes: list[str]) -> str:
    """Why an image with these volumes can't be used; empty for none: what is written there lies in no snapshot, and no
    bound of the machine's disk holds for it."""
    return (
        f"its image keeps {', '.join(volumes)} in volumes (VOLUME), which are neither bounded nor weighed"
        if volumes
        else ""
    )


def started_words(machine: Machine, facts: ImageFacts) -> list[str]:
    """All words of what `Machines.start` runs."""
    check = [machine.healthcheck.command] if machine.healthcheck else []
    return [*facts.entrypoint, *machine.start, *check]


def python_path(machine: Machine, facts: ImageFacts) -> list[str]:
    """Folders in which a Python of the verifier looks before its own library."""
    env = facts.env | machine.env | machine.grading.env
    workdir = machine.workdir or facts.workdir
    entries = [str(PurePosixPath(workdir) / entry) for entry in env.get("PYTHONPATH", "").split(":") if entry]
    return [*entries, *([workdir] if MODULE.search(script_of(machine.grading)) else [])]


def environments(machine: Machine, facts: ImageFacts) -> list[str]:
    """Where uv, in a verifier that runs it, would look for an interpreter, and start it: those that an agent made."""
    if not UV.search(script_of(machine.grading)):
        return []
    workdir = PurePosixPath(machine.workdir or facts.workdir)
    places = [str(folder / ".venv") for folder in (workdir, *workdir.parents)]
    return [place for place in places if not any(within(library, place) for library in facts.interpreters)]


def folders_script(machine: Machine, agent: Person) -> str:
    """Shell that makes the folders of the format: its logs, for everybody; where the agent works and where an oracle
    puts its files, for the agent."""
    shared = " ".join(map(shlex.quote, machine.folders))
    own = " ".join(map(shlex.quote, filter(None, [machine.oracle_folder])))
    lines = [f"mkdir -p {shared} && chmod a+rwx {shared}"] if shared else []
    lines += [f"mkdir -p {own} && chown {agent.uid}:{agent.gid} {own}"] if own and agent.uid else []
    # Results of commands lie below it: no agent that isn't root shall reach them.
    lines.append(f"chmod 700 {CLOSED}")
    return "\n".join(["set -e", *lines, f"[ -d {shlex.quote(agent.cwd)} ] || mkdir -p {shlex.quote(agent.cwd)}"])


def _in_any_shell(person: Person) -> Person:
    return Person(uid=person.uid, gid=person.gid, env=person.env, cwd=person.cwd, shell="/bin/sh")


def _trusted(op_id: str, command: str) -> Operation:
    return Operation(op_id=op_id, command=command, timeout_s=PREPARE_S, root=True, cwd="/")
