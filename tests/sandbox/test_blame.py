"""Whose fault it is: the rules, the host's figures, and real sandboxes that ended in ways an exit code can't tell."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.channel import Operation
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import ON_A_FIT_HOST, Blame, Finding, SandboxGone, Sign, blame, broken_by_agent, find
from activities.sandbox.host import Health, Host, Limit
from activities.sandbox.inquest import Inquest
from tests.sandbox.conftest import Box, docker, opened
from tests.sandbox.test_rules import result
from workflows.contracts import SandboxLease
from workflows.errors import SandboxError, Undetermined

FAULT = ["the host's disk is full"]
SMALL_MEMORY = SandboxSpec(memory_mb=64, work_mb=62, data_mb=1, tmp_mb=62, processes=48)
"""Its files alone can reach the limit: then there is nobody left to kill but process 1."""


@pytest.mark.parametrize("sign", Sign)
def test_a_counter_of_the_sandbox_speaks_against_the_agent_unless_the_host_is_at_fault_too(sign: Sign) -> None:
    finding = Finding(sign, own=True, words="")
    assert blame(finding, []) is Blame.AGENT
    assert blame(finding, FAULT) is Blame.UNKNOWN


@pytest.mark.parametrize("sign", Sign)
def test_without_a_counter_a_fault_of_the_host_is_enough(sign: Sign) -> None:
    finding = Finding(sign, own=False, words="")
    assert blame(finding, FAULT) is Blame.HOST
    assert blame(finding, []) is ON_A_FIT_HOST[sign]


@pytest.mark.parametrize("faults", [[], FAULT])
def test_a_counter_that_can_not_tell_blames_nobody(faults: list[str]) -> None:
    assert blame(Finding(Sign.OUT_OF_MEMORY, own=None, words=""), faults) is Blame.UNKNOWN


def test_every_sign_has_a_rule_for_a_fit_host() -> None:
    assert set(ON_A_FIT_HOST) == set(Sign)
    assert ON_A_FIT_HOST[Sign.DIED] is Blame.HOST
    assert ON_A_FIT_HOST[Sign.OUT_OF_MEMORY] is Blame.HOST
    assert ON_A_FIT_HOST[Sign.KILLED] is Blame.AGENT


@pytest.mark.parametrize(
    ("fields", "sign", "own"),
    [
        ({}, None, False),
        ({"exit_code": 137}, None, False),
        ({"exit_code": None, "signal": signal.SIGTERM}, None, False),
        ({"exit_code": None, "signal": signal.SIGKILL}, Sign.KILLED, False),
        ({"exit_code": None, "signal": signal.SIGKILL, "oom_kills": 1}, Sign.OUT_OF_MEMORY, True),
        ({"exit_code": None, "spawn_errno": 11}, Sign.NOT_STARTED, False),
        ({"exit_code": None, "spawn_errno": 11, "pids_hits": 1}, Sign.NOT_STARTED, True),
        ({"exit_code": None, "spawn_errno": 11, "pids": 48, "pids_max": 48}, Sign.NOT_STARTED, True),
        ({"pids": 47, "pids_max": 48}, Sign.FORK_BOMB, True),
        ({"full": ("/work",)}, Sign.DISK_FULL, True),
        ({"exit_code": None, "timed_out": True}, Sign.TIMED_OUT, False),
        ({"exit_code": None, "timed_out": True, "signal": signal.SIGKILL}, Sign.TIMED_OUT, False),
    ],
)
def test_a_result_gives_a_sign_where_its_exit_code_is_not_enough(
    fields: dict[str, Any], sign: Sign | None, own: bool
) -> None:
    found = find(result(**fields))
    assert (found.sign if found else None, found.own if found else False) == (sign, own)
    assert bool(broken_by_agent(result(**fields))) is (own or sign is Sign.KILLED)


def test_a_host_is_at_fault_for_a_full_disk_and_for_stalls_that_no_single_sandbox_makes() -> None:
    assert Health().faults == []
    assert Health(disk_free_mb=70_000, memory_available=0.6, memory_stall=0.0, cpu_pressure=95.0).faults == []
    assert "disk is full" in Health(disk_free_mb=3).faults[0]
    assert "stalls for memory" in Health(memory_available=0.02, memory_stall=40.0).faults[0]
    assert Health(memory_available=0.6, memory_stall=40.0).faults == [], "one sandbox at its own limit"


def test_only_figures_that_a_host_offers_are_reported(tmp_path: Path) -> None:
    assert Host(tmp_path, tmp_path).health(None).report() == {}
    assert Host(tmp_path, tmp_path).oom_kills() is None
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=86.69 avg60=84.32 avg300=58.47 total=52\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 57\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 250 kB\nHugePages_Total: 0\n")
    host = Host(tmp_path, tmp_path)
    assert host.health(tmp_path).report().keys() == {"disk free", "memory available", "cpu pressure"}
    assert (host.health(None).cpu_pressure, host.health(None).memory_available) == (86.69, 0.25)
    assert host.oom_kills() == 57


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        (
            "4:memory:/p/c",
            {"memory/p/c/memory.max_usage_in_bytes": "100", "memory/p/c/memory.limit_in_bytes": "100"},
            Limit.TOUCHED,
        ),
        (
            "4:memory:/p/c",
            {"memory/p/c/memory.max_usage_in_bytes": "50", "memory/p/c/memory.limit_in_bytes": "100"},
            Limit.NEVER,
        ),
        ("0::/p/c", {"p/c/memory.events": "max 9\noom 1\noom_kill 1\n"}, Limit.EXCEEDED),
        ("0::/p/c", {"p/c/memory.events": "max 9\noom 0\noom_kill 1\n"}, Limit.NEVER),
        ("0::/p/c", {}, Limit.UNKNOWN),
    ],
)
def test_a_peak_at_the_limit_is_told_from_an_allocation_that_failed_there(
    tmp_path: Path, line: str, files: dict[str, str], limit: Limit
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"3:cpu:/p/c\n{line}\n")
    assert Host(tmp_path, tmp_path).memory_limit(7) is limit


class Trial:
    """Runs a command in a box and holds the inquest on it, as `act` does."""

    def __init__(self, box: Box, host: Host | None = None) -> None:
        self.box = box
        self.inquest = Inquest(box.backend, host)
        self.lease = SandboxLease(
            sandbox_id=box.id, container_id=box.container_id, image_id="", host="here", attempt_id=box.attempt
        )

    async def __call__(self, command: str, timeout_s: float = 20) -> tuple[str, dict[str, str]]:
        before = self.inquest.begin()
        op = Operation(op_id=f"act-{command}", command=command, timeout_s=timeout_s)
        try:
            doing = await self.inquest.on_result(self.lease, op, await self.box.backend.run(self.box.id, op), before)
        except SandboxGone as gone:
            if gone.evidence:
                raise
            doing = await self.inquest.on_death(self.lease, gone, before)
        return doing.broken, doing.evidence or {}


class Unfit(Host):
    def health(self, docker_root: Path | None) -> Health:
        return Health(disk_free_mb=1)


class OtherMemory(Host):
    """A host whose kernel killed although the sandbox never reached its own limit: as when the trainer eats it all."""

    def memory_limit(self, pid: int) -> Limit:
        assert super().memory_limit(pid) in (Limit.TOUCHED, Limit.EXCEEDED)
        return Limit.NEVER


class Unread(Host):
    """A host that says this of every sandbox's memory limit."""

    def __init__(self, limit: Limit) -> None:
        super().__init__()
        self.limit = limit

    def memory_limit(self, pid: int) -> Limit:
        return self.limit


EAT = "x=a; while :; do x=$x$x$x; done"


@pytest.mark.docker
async def test_memory_that_the_agent_ate_itself_is_its_own_doing(box: Box) -> None:
    broken, evidence = await Trial(box)(EAT)
    assert "out of memory" in broken
    assert (evidence["own memory limit"], evidence["blame"]) == ("reached", "agent")
    assert evidence["canary"].startswith("answered in")


@pytest.mark.docker
async def test_memory_that_the_host_had_not_is_not_the_agents_doing(box: Box) -> None:
    with pytest.raises(SandboxGone) as lost:
        await Trial(box, OtherMemory())(EAT)
    assert not lost.value.retryable
    assert (lost.value.evidence["own memory limit"], lost.value.evidence["blame"]) == ("never reached", "host")


@pytest.mark.docker
@pytest.mark.parametrize("limit", [Limit.TOUCHED, Limit.UNKNOWN])
async def test_a_kill_without_a_word_of_the_kernel_on_the_sandboxs_own_limit_is_nobodys_fault(
    box: Box, limit: Limit
) -> None:
    trial = Trial(box, Unread(limit))
    killed = result(exit_code=137, oom_kills=1)
    with pytest.raises(Undetermined) as undetermined:
        await trial.inquest.on_result(trial.lease, Operation("act", "", 1), killed, trial.inquest.begin())
    assert undetermined.value.evidence["own memory limit"] == "unknown"
    broken, evidence = await trial(EAT)
    assert "out of memory" in broken, "the kernel's word is enough where the counters say nothing"
    assert evidence["blame"] == "agent"


@pytest.mark.docker
async def test_memory_eaten_before_its_worker_died_is_still_the_agents_doing(box: Box) -> None:
    trial = Trial(box)
    op = Operation(op_id="act", command=EAT, timeout_s=20)
    await box.backend.run(box.id, op)
    again = await box.backend.run(box.id, op)
    assert again.replayed
    doing = await trial.inquest.on_result(trial.lease, op, again, trial.inquest.begin())
    assert (doing.evidence or {})["blame"] == "agent"


@pytest.mark.docker
async def test_an_agent_at_its_limits_on_a_host_that_is_at_its_own_is_nobodys_fault(box: Box) -> None:
    with pytest.raises(Undetermined, match="so nobody is blamed") as undetermined:
        await Trial(box, Unfit())("cat /dev/zero > big")
    assert undetermined.value.evidence["faults of the host"] == "the host's disk is full (1 MB free)"


@pytest.mark.docker
async def test_a_shell_that_was_killed_is_the_agents_on_a_fit_host_alone(box: Box) -> None:
    broken, _ = await Trial(box)("kill -9 $$")
    assert broken == "the command killed its own shell"
    with pytest.raises(SandboxGone):
        await Trial(box, Unfit())("kill -9 $$ ")


@pytest.mark.docker
async def test_a_first_process_that_its_own_limit_took_is_told_from_one_that_was_killed_from_outside(
    backend: DockerBackend, box: Box
) -> None:
    sleeping = asyncio.create_task(Trial(box)("exec sleep 30"))
    await asyncio.sleep(0.5)
    docker(backend._daemon.docker_host, "kill", box.id)
    with pytest.raises(SandboxGone, match="killed by a request to the daemon") as killed:
        await sleeping
    assert killed.value.evidence["blame"] == "host"
    async with opened(backend, SMALL_MEMORY) as full:
        trial, broken = Trial(full), ""
        for command in (
            "cat /dev/zero > /work/a & cat /dev/zero > /tmp/b; wait",
            "echo here",
            "cat /dev/zero > /tmp/c",
        ):
            broken, evidence = await trial(command)
            if broken:
                break
        assert "memory" in broken or "disk is full" in broken
        assert evidence["blame"] == "agent"


@pytest.mark.docker
async def test_a_time_out_on_a_fit_host_is_looked_into_without_a_canary(box: Box) -> None:
    broken, evidence = await Trial(box)("sleep 30", timeout_s=0.3)
    assert (broken, evidence["blame"]) == ("", "agent")
    assert "canary" not in evidence
    with pytest.raises(SandboxError, match="stalls for memory"):
        await Trial(box, Stalled())("sleep 31", timeout_s=0.3)


class Stalled(Host):
    def health(self, docker_root: Path | None) -> Health:
        return Health(memory_available=0.01, memory_stall=80.0)


@pytest.mark.docker
async def test_a_canary_is_gone_after_it_sang(box: Box) -> None:
    await Trial(box)("cat /dev/zero > big")
    for _ in range(100):
        names = await box.backend._names({"ratchet.kind": "canary"})
        if not names:
            break
        await asyncio.sleep(0.1)
    assert names == set()


@pytest.mark.docker
async def test_agents_that_end_together_ask_one_canary(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, asked = Trial(box), 0

    async def count(_: str) -> str:
        nonlocal asked
        asked += 1
        return "answered in 0.1 s"

    monkeypatch.setattr(trial.inquest, "_ask_canary", count)
    await asyncio.gather(*(trial(f"echo {number}; kill -9 $$") for number in range(5)))
    assert asked == 1
