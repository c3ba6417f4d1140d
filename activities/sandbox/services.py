"""Programs beside a sandbox: a task's services, each in a container of its own, in the sandbox's network.

Owns their life from the first container to the verdict. Each is a sandbox as every other: limits, labels, sbxd, and for
native tasks the snapshot of its setup; it is closed with the one that it stands beside (`DockerBackend`). Promises: the
network is the sandbox's own loopback, so that nothing leads out and nobody else is in it; every service was healthy
before the agent began, and its state then was the snapshot's; a retried start does nothing twice; one whose container
is lost is infrastructure's failure, which names it; one that is there and fails its health check after the agent is to
the verdict what a broken verifier is, so that the known-good answer, with services of its own, decides whose doing it
was. Called by `Preparation`, `Machines`, `Examiner` and `SandboxActivities`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from activities.sandbox.boxes import named_disk
from activities.sandbox.channel import Operation, Person, Result
from activities.sandbox.container import Bind, SandboxSpec
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.owned import ATTEMPTS, SERVICE
from activities.sandbox.verification import Run, ServiceFailed, describe, is_check
from tasksets.base import Healthcheck, Service, Task
from workflows.errors import SandboxError

Value = TypeVar("Value")
SpecOf = Callable[[Service], Awaitable[SandboxSpec]]
Furnish = Callable[[Service, Sandbox], Awaitable[Operation]]
"""Makes a service's sandbox ready; the operation that starts its program there."""

HOSTS = "/etc/hosts"
PERSON = "ratchet.person"
"""Label of a sandbox's folder: who the agent is in a machine of its own, or a service's program, as JSON."""
KEPT = ("run", "group", "episode", "attempt", "task", "generation")
"""Labels that a service has of its sandbox."""
STATE_S = 15.0
POLL_S = 0.5
LATER_S = 10.0
SLOWEST = 4
"""Tries of a health check that may take all of their time."""
STATE_BYTES = 64 << 10
SAID = 300
LOG = "/tmp/service.log"
LOG_BYTES = 64 << 10
"""Of what a native service says: the first of it."""
SOMETHING_RUNS = """
for path in /proc/[0-9]*; do
    pid=${path#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] || while read -r name value rest; do
        [ "$name" = State: ] && [ "$value" != Z ] && exit 0
    done < "$path/status"
done 2> /dev/null
exit 1"""
"""Is one of its processes there? The shell itself looks: nothing else of this command is."""


class Services:
    def __init__(self, backend: DockerBackend) -> None:
        self._backend = backend

    def binds(self, task: Task) -> tuple[Bind, ...]:
        """What a sandbox of the task needs to know its services by name: the same file for the same names, so that one
        which was started before anyone asked may be taken. Raises SandboxError."""
        if not task.services:
            return ()
        names = " ".join(name for service in task.services for name in (service.name, *service.aliases))
        text = f"127.0.0.1 localhost\n127.0.0.1 {names}\n"
        path = self._backend.state / "hosts" / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not path.is_file():
            with named_disk():
                path.parent.mkdir(parents=True, exist_ok=True)
                fresh = path.with_name(f"{path.name}.{os.getpid()}.part")
                fresh.write_text(text)
                fresh.chmod(0o644)
                fresh.replace(path)
        return (Bind(str(path), HOSTS),)

    # --- before the agent -----------------------------------------------------------------------------------------

    async def open(self, task: Task, sandbox: Sandbox, spec_of: SpecOf, furnish: Furnish) -> None:
        """Start all of the task's services beside the sandbox, each once the one before is healthy. Raises
        SandboxError, which names the service, final where it would fail again."""
        if not task.services:
            return
        if runtime := sandbox.recipe.spec.runtime:
            words = f"{task.id}: services need the daemon's own runtime, in {runtime} no two share a network"
            raise SandboxError(words, retryable=False)
        begun = [self._named(one, self._begin(task, one, sandbox, spec_of, furnish)) for one in task.services]
        # All of them: what is half made when one fails would be nobody's.
        made = await asyncio.gather(*begun, return_exceptions=True)
        for error in made:
            if isinstance(error, BaseException):
                raise error
        ids = self._backend.boxes.services(sandbox.id)
        for service, op in zip(task.services, made, strict=True):
            assert isinstance(op, Operation)
            await self._named(service, self._start(service, ids[service.name], op))

    async def _begin(
        self, task: Task, service: Service, sandbox: Sandbox, spec_of: SpecOf, furnish: Furnish
    ) -> Operation:
        found = self._backend.boxes.labels(sandbox.id)
        labels = {name: found[f"ratchet.{name}"] for name in KEPT if f"ratchet.{name}" in found}
        kind = found.get("ratchet.kind", "")
        labels |= {
            # One of a person's own command is nobody's attempt.
            "kind": SERVICE if kind in ATTEMPTS else f"{kind}-{SERVICE}",
            "beside": sandbox.id,
            "service": service.name,
        }
        spec = replace(await spec_of(service), beside=sandbox.container_id, binds=self.binds(task))
        with named_disk():
            self._backend.boxes.add_service(sandbox.id, service.name, self._backend.id_for(labels))
        return await furnish(service, await self._backend.acquire(spec, labels))

    async def _start(self, service: Service, service_id: str, op: Operation) -> None:
        result = await self._backend.run(service_id, op)
        if result.exit_code == 0:
            result = await self._backend.run(service_id, self._health(service, service_id, "healthy", first=True))
        if result.exit_code != 0:
            words = f"it does not get healthy: {describe(result)}: {await self._said(service, service_id, result)}"
            raise SandboxError(words, retryable=False)

    # --- while and after the agent acts ---------------------------------------------------------------------------

    async def attend(self, sandbox_id: str) -> None:
        """Raises SandboxError, which names it, where a service beside the sandbox has no container any more."""
        for name, service_id in self._backend.boxes.services(sandbox_id).items():
            await self._named(name, self._backend.ask(service_id, "attend", 0.0))

    def checked(self, task: Task, sandbox_id: str, run: Run) -> Run:
        """`run`, where a check is told what the task's services say of their state. Raises ServiceFailed as well."""

        async def checked(op: Operation) -> Result:
            if is_check(op):
                op = replace(op, env=op.env | await self.look(task, sandbox_id))
            return await run(op)

        return checked

    async def look(self, task: Task, sandbox_id: str) -> dict[str, str]:
        """What the services say of their state, by the names of variables: nobody but the verifier may be left to speak
        to them. Raises ServiceFailed, and SandboxError, which names it, for one that is lost."""
        states: dict[str, str] = {}
        ids = self._backend.boxes.services(sandbox_id)
        for service in task.services:
            if service.name not in ids:
                raise SandboxError(f"the service {service.name} is lost: its sandbox's folder is gone", retryable=False)
            await self._named(service, self._still_well(service, ids[service.name]))
            if service.state:
                states[service.variable] = await self._named(service, self._state(service, ids[service.name]))
        return states

    async def _still_well(self, service: Service, service_id: str) -> None:
        result = await self._backend.run(service_id, self._health(service, service_id, f"healthy-{uuid.uuid4().hex}"))
        if result.exit_code == 0:
            return
        said = await self._said(service, service_id, result)
        raise ServiceFailed(
            f"the service {service.name} is not healthy any more: {describe(result)}: {said}",
            {
                "service": service.name,
                "its health check": f"{describe(result)}: {said}",
                "its oom kills": str(result.oom_kills),
                "its processes": f"{result.pids} of {result.pids_max}, refused {result.pids_hits} times",
            },
        )

    async def _state(self, service: Service, service_id: str) -> str:
        op = Operation(
            op_id=f"state-{uuid.uuid4().hex}",
            command=service.state,
            timeout_s=STATE_S,
            root=True,
            env=service.env,
            cap_bytes=2 * STATE_BYTES,
        )
        result = await self._backend.run(service_id, op)
        said = (result.head + result.tail).decode(errors="replace")
        if result.exit_code != 0 or result.total_bytes > STATE_BYTES:
            size = f"{result.total_bytes} bytes" if result.exit_code == 0 else said[-SAID:].strip()
            words = f"the state of the service {service.name} can't be read: {describe(result)}: {size}"
            raise ServiceFailed(words, {"service": service.name, "its state": describe(result)})
        return said.rstrip("\n")

    # ---------------------------------------------------------------------------------------------------------------

    def _health(self, service: Service, service_id: str, op_id: str, *, first: bool = False) -> Operation:
        check = service.healthcheck
        if check is None:
            # A program that can't run at all has ended by then.
            command = f"sleep {POLL_S if first else 0}\n{SOMETHING_RUNS}"
            return Operation(op_id=op_id, command=command, timeout_s=STATE_S, root=True, cwd="/")
        check = polled(check, first=first)
        noted = self._backend.boxes.labels(service_id).get(PERSON)
        person = Person(**json.loads(noted)) if noted else None
        return healthy(check, person, op_id=op_id, env=service.env)

    async def _said(self, service: Service, service_id: str, result: Result) -> str:
        """The last line of a health check, and the last words of the service itself where they are kept."""
        lines = (result.tail or result.head).decode(errors="replace").strip().splitlines()
        words = lines[-1][-SAID:] if lines else "(nothing)"
        if service.image is not None:
            return words
        op = Operation(op_id=f"log-{uuid.uuid4().hex}", command=f"tail -c {SAID} {LOG}", timeout_s=STATE_S, root=True)
        log = await self._backend.run(service_id, op)
        kept = " ".join((log.head + log.tail).decode(errors="replace").split())
        return f"{words}; it said: {kept or '(nothing)'}"

    async def _named(self, service: Service | str, work: Awaitable[Value]) -> Value:
        """What goes wrong with a service's sandbox says with whose; it is never the agent's own that is gone."""
        try:
            return await work
        except SandboxError as error:
            name = service if isinstance(service, str) else service.name
            words = f"the service {name}: {error}"
            raise SandboxError(words, retryable=error.retryable, evidence=error.evidence) from error


def polled(check: Healthcheck, *, first: bool) -> Healthcheck:
    """The check as it is made here: `first`, for as long as it says, but more often, since all wait for it; later, of
    what was healthy, within LATER_S."""
    pause_s = min(check.interval_s, POLL_S)
    whole_s = (check.retries + 1) * check.interval_s
    whole_s = check.start_s + whole_s if first else min(whole_s, LATER_S)
    return Healthcheck(
        command=check.command,
        interval_s=pause_s,
        timeout_s=check.timeout_s,
        retries=math.ceil(whole_s / pause_s) - 1 if pause_s else check.retries,
    )


def native_spec(task: Task, service: Service) -> SandboxSpec:
    return SandboxSpec(image=task.image, memory_mb=service.memory_mb, cpus=service.cpus, processes=service.processes)


def native_task(service: Service) -> Task:
    """Its setup as a task's, which is run once and forked."""
    variables = "".join(f"export {name}={_quoted(value)}\n" for name, value in sorted(service.env.items()))
    return Task(
        id=f"service {service.name}",
        kind=SERVICE,
        instruction="",
        setup=variables + (service.setup or "true"),
        check="",
    )


def native_start(service: Service) -> Operation:
    """The first of what the program says is kept, the rest goes nowhere: it neither fills anything nor blocks."""
    kept = f"{{ head -c {LOG_BYTES} > {LOG}; cat > /dev/null; }}"
    command = f"{{ {{ {service.start}\n}} 2>&1 | {kept}; }} > /dev/null 2>&1 < /dev/null &"
    return Operation(op_id="start", command=command, timeout_s=STATE_S, env=service.env)


def healthy(
    check: Healthcheck, person: Person | None, *, op_id: str = "healthy", env: dict[str, str] | None = None
) -> Operation:
    """Waits until the check succeeds, as often as it may fail. Its own shell is the image's."""
    loop = f"for try in $(seq {check.retries + 1}); do ( {check.command}\n) && exit 0; sleep {check.interval_s:g}; done"
    tries_s = (check.retries + 1) * check.interval_s + min(check.retries + 1, SLOWEST) * check.timeout_s
    return Operation(
        op_id=op_id,
        command=f"sleep {check.start_s:g}; {loop}; exit 1",
        timeout_s=check.start_s + tries_s,
        env=env or {},
        person=person,
    )


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
