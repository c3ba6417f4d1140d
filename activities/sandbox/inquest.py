"""Finds out whose doing an ending was where an exit code or a dead container can't tell.

Gathers evidence only then: counters of the sandbox, the state of the host, a canary. Promises that the agent's doing
comes back as words and evidence, the host's as SandboxError and what contradicts itself as Undetermined, both with the
evidence. Called by `SandboxActivities`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from activities.sandbox.channel import KILL_S, Operation, Result
from activities.sandbox.container import SandboxSpec
from activities.sandbox.daemon import docker_root, killed_by_request, met_memory_limit
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import Blame, Finding, SandboxGone, Sign, blame, find
from activities.sandbox.host import CANARY_S, Host, Limit
from workflows.contracts import SandboxLease
from workflows.errors import SandboxError, Undetermined

CANARY = SandboxSpec(memory_mb=32, work_mb=1, data_mb=1, tmp_mb=1, processes=16)
CANARY_FRESH_S = 2.0
"""How long a canary's answer stands for other sandboxes that ask at the same time."""
EVENT_S = 1.0
"""How long the kernel's word on a memory limit may take to the daemon."""


@dataclass(frozen=True)
class Start:
    """What a command's end is compared with."""

    at: float
    oom_kills: int | None
    """Those of the whole host."""


@dataclass(frozen=True)
class Doing:
    """The agent's doing: why its sandbox can't be used any more, empty where it can, and what was measured."""

    broken: str = ""
    evidence: dict[str, str] | None = None


class Inquest:
    def __init__(self, backend: DockerBackend, host: Host | None = None) -> None:
        self._backend = backend
        self._host = host or Host()
        self._asking = asyncio.Lock()
        self._answered = float("-inf")
        self._answer = ""

    def begin(self) -> Start:
        """What `on_result` and `on_death` compare with: taken before the command."""
        return Start(time.time(), self._host.oom_kills())

    async def on_result(self, lease: SandboxLease, op: Operation, result: Result, before: Start) -> Doing:
        """What a command's result means. Raises SandboxError (final) or Undetermined where it is not the agent's."""
        finding = find(result)
        if finding is None:
            return Doing()
        evidence = _counters(finding, result)
        if finding.sign is Sign.TIMED_OUT:
            overrun = result.seconds - op.timeout_s - KILL_S
            faults = [f"the sandbox was not scheduled for {overrun:.1f} s"] if overrun > 0 else []
            return await self._decide(finding, evidence, faults, root=None)
        if finding.sign is Sign.OUT_OF_MEMORY:
            # A result out of the journal is older than `before`.
            own = await self._exceeded(lease, 0.0 if result.replayed else before.at)
            evidence["own memory limit"] = {True: "reached", False: "never reached", None: "unknown"}[own]
            finding = replace(finding, own=own)
        return await self._with_canary(finding, evidence, lease, before)

    async def on_death(self, lease: SandboxLease, gone: SandboxGone, before: Start) -> Doing:
        """What the end of a container means. Raises as `on_result`."""
        finding = Finding(Sign.DIED, gone.by_agent, str(gone))
        asked = await killed_by_request(self._backend.daemon, lease.container_id)
        faults = ["its container was killed by a request to the daemon"] if asked else []
        return await self._with_canary(finding, {"sign": str(gone)}, lease, before, faults)

    async def _exceeded(self, lease: SandboxLease, since: float) -> bool | None:
        """Whether the sandbox's own memory limit is why the kernel killed in it since then; None where nothing says.

        A peak at the limit alone does not: it lasts, and files that the kernel may drop count in it."""
        pid = await self._backend.pid(lease.sandbox_id)
        limit = await asyncio.to_thread(self._host.memory_limit, pid)
        if limit in (Limit.NEVER, Limit.EXCEEDED):
            return limit is Limit.EXCEEDED
        until = time.monotonic() + EVENT_S
        while not await met_memory_limit(self._backend.daemon, lease.container_id, since):
            if time.monotonic() > until:
                return None
            await asyncio.sleep(0.1)
        return True

    async def _with_canary(
        self,
        finding: Finding,
        evidence: dict[str, str],
        lease: SandboxLease,
        before: Start,
        faults: Sequence[str] = (),
    ) -> Doing:
        died, answer = await self._canary(lease.attempt_id)
        now = self._host.oom_kills()
        elsewhere = now - before.oom_kills if now is not None and before.oom_kills is not None else 0
        found = [*faults, *([f"canary: {answer}"] if died else [])]
        if elsewhere and not finding.own and finding.sign in (Sign.DIED, Sign.NOT_STARTED):
            found.append(f"the kernel killed {elsewhere} processes outside the sandbox for want of memory")
        evidence |= {"canary": answer, "oom kills on the host": str(elsewhere)}
        return await self._decide(finding, evidence, found, root=await docker_root(self._backend.daemon))

    async def _decide(
        self, finding: Finding, evidence: dict[str, str], faults: list[str], *, root: Path | None
    ) -> Doing:
        health = await asyncio.to_thread(self._host.health, root)
        faults = [*faults, *health.faults]
        verdict = blame(finding, faults)
        evidence |= health.report() | {"faults of the host": "; ".join(faults) or "none", "blame": verdict}
        match verdict:
            case Blame.AGENT:
                broken = "" if finding.sign is Sign.TIMED_OUT else finding.words
                return Doing(broken, evidence)
            case Blame.HOST:
                raise SandboxGone("; ".join([finding.words, *faults]), evidence=evidence)
            case Blame.UNKNOWN:
                raise Undetermined("; ".join([finding.words, *faults, "so nobody is blamed"]), evidence=evidence)

    async def _canary(self, attempt_id: str) -> tuple[bool, str]:
        """(dead, in words): whether this host still starts a sandbox and runs a trivial command in it in time."""
        async with self._asking:
            if time.monotonic() - self._answered > CANARY_FRESH_S:
                self._answer = await self._ask_canary(attempt_id)
                self._answered = time.monotonic()
        return not self._answer.startswith("answered"), self._answer

    async def _ask_canary(self, attempt_id: str) -> str:
        labels = {"kind": "canary", "run": attempt_id.rsplit("/", 3)[0], "attempt": attempt_id}
        sandbox_id = self._backend.id_of(attempt_id, "canary")
        began = time.monotonic()
        try:
            async with asyncio.timeout(CANARY_S):
                await self._backend.acquire(CANARY, labels)
                op = Operation(op_id="sing", command="echo alive", timeout_s=CANARY_S, root=True)
                result = await self._backend.run(sandbox_id, op)
            if result.head != b"alive\n":
                return f"said {result.head[:40]!r} instead of alive"
            return f"answered in {time.monotonic() - began:.2f} s"
        except TimeoutError:
            return f"no answer within {CANARY_S:.0f} s"
        except SandboxError as error:
            return f"can't be started: {error}"
        finally:
            self._backend.forget(sandbox_id)


def _counters(finding: Finding, result: Result) -> dict[str, str]:
    return {
        "sign": finding.words,
        "sandbox's oom kills": str(result.oom_kills),
        "sandbox's processes": f"{result.pids} of {result.pids_max}, refused {result.pids_hits} times",
    }
