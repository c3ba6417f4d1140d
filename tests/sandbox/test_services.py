"""Services beside the sandbox: reached by name, walled in, the same for every attempt, and part of the verdict."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from activities.sandbox.machines.machines import Machines
from activities.sandbox.trial import Trial
from tasksets import open_taskset
from tasksets.base import Healthcheck, Service, Task
from tests.sandbox.conftest import docker
from tests.sandbox.test_activities import Episode, call
from tests.sandbox.test_machine_attempts import Only
from workflows.contracts import AcquireInput, JournalEntry, ReleaseInput, ReplayInput, Split, SweepInput, TaskRef
from workflows.errors import SandboxError, VerifierBrokenByAnswer, VerifierError

pytestmark = pytest.mark.docker

EXAMPLE = Path(__file__).parents[2] / "examples/tasks/api"
PAGE = """#!/bin/sh
printf 'Status: 200 OK\\r\\n\\r\\n'
case "$PATH_INFO" in
/die) kill -9 "$PPID" "$(cat /work/pid)" ;;
/write) cat > /work/word ;;
*) cat /work/word ;;
esac
"""
SETUP = f"""
mkdir -p /data/cgi-bin && cat > /data/cgi-bin/word <<'END'
{PAGE}END
chmod 755 /data/cgi-bin/word
echo plum > /work/word && chmod 666 /work/word
head -c 9 /dev/urandom | base64 > /data/made
"""
URL = "http://web:8080/cgi-bin/word"
WEB = Service(
    name="web",
    setup=SETUP,
    start="sh -c 'echo $$ > /work/pid; exec httpd -f -p 8080 -h /data'",
    healthcheck=Healthcheck(
        command="wget -qO /dev/null 127.0.0.1:8080/cgi-bin/word", interval_s=0.05, timeout_s=0.2, retries=30
    ),
    state="cat /work/word",
    memory_mb=192,
)
TASK = Task(
    id="word",
    kind="api",
    instruction="Have the service say pear.",
    setup="true",
    check='[ "$STATE_WEB" = pear ]',
    oracle=[f"wget -qO- --post-data pear {URL}/write"],
    oracle_answer="done",
    services=[WEB],
)
_numbers = itertools.count()
Attempted = Callable[..., Any]


def changed(task: Task = TASK, **fields: Any) -> Task:
    """The task with its service changed."""
    return task.model_copy(update={"services": [task.services[0].model_copy(update=fields)]})


@pytest.fixture
def attempted(backend: DockerBackend) -> Attempted:
    @asynccontextmanager
    async def attempted(task: Task = TASK) -> AsyncIterator[Episode]:
        activities = SandboxActivities(backend, lambda name: Only(task), host="here")
        episode = Episode(activities, task.id, f"services/g0/e0/a{next(_numbers)}")
        try:
            await episode.acquire()
            yield episode
        finally:
            await call(activities.release, ReleaseInput(attempt_id=episode.attempt))
            await backend.settled()

    return attempted


def container_of(backend: DockerBackend, episode: Episode) -> str:
    """That of its only service."""
    [service] = backend.boxes.services(episode.lease.sandbox_id).values()
    return backend.boxes.container(service)


def everything(host: str, *, run: str = "services") -> list[str]:
    return docker(host, "ps", "-aq", "--filter", f"label=ratchet.run={run}").split()


async def test_an_agent_reaches_a_service_by_its_name_and_its_state_decides(
    backend: DockerBackend, attempted: Attempted
) -> None:
    async with attempted() as episode:
        assert (await episode.act(f"wget -qO- {URL}")).output == "plum\n"
        assert (await episode.verify()).reward == 0.0
    async with attempted() as episode:
        await episode.act(TASK.oracle[0])
        verdict = await episode.verify()
        assert (verdict.passed, verdict.reward) == (True, 1.0)
        assert (await episode.verify()).reward == 1.0


async def test_a_service_has_the_walls_of_a_sandbox_and_its_network_leads_nowhere(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    async with attempted() as episode:
        shown = json.loads(docker(docker_host, "inspect", container_of(backend, episode)))[0]
        host, config = shown["HostConfig"], shown["Config"]
        assert host["NetworkMode"] == f"container:{episode.lease.container_id}"
        assert host["Memory"] == host["MemorySwap"] == 192 << 20 and host["PidsLimit"] == 128
        assert (host["CapDrop"], host["ReadonlyRootfs"], host["NanoCpus"]) == (["ALL"], True, 10**9)
        found = {
            name: config["Labels"].get(f"ratchet.{name}") for name in ("kind", "service", "run", "attempt", "group")
        }
        assert found == {
            "kind": "service",
            "service": "web",
            "run": "acts",
            "attempt": episode.attempt,
            "group": "acts/g0",
        }
        assert (await episode.act("ls /sys/class/net; cat /proc/[0-9]*/comm | grep -c httpd")).output == "lo\n0\n"
        assert (await episode.act("nc -w 2 172.17.0.1 22 || nc -w 2 1.1.1.1 80", timeout_s=8)).exit_code != 0


async def test_every_attempt_begins_with_the_same_state_and_none_sees_anothers(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    task = changed(state="cat /data/made /work/word")
    made = []
    for _ in range(2):
        async with attempted(task) as episode:
            container = container_of(backend, episode)
            made.append(docker(docker_host, "exec", container, "cat", "/data/made", "/work/word"))
            await episode.act(TASK.oracle[0])
    assert made[0] == made[1] and made[0].endswith("plum")


FAKES = {
    "a variable": "echo 'export STATE_WEB=pear' > /work/.profile; export STATE_WEB=pear",
    "a program in its place": "(while :; do echo pear | nc -l -p 9090; done) > /dev/null 2>&1 &",
    "a file of that name": "mkdir -p /work/state /tmp/web; echo pear > /work/word; echo pear > /tmp/word",
    "another name": "echo 127.0.0.2 web >> /etc/hosts; echo pear > /data/word",
}


@pytest.mark.parametrize("name", FAKES)
async def test_an_agent_that_only_looks_as_if_it_had_done_it_is_not_paid(attempted: Attempted, name: str) -> None:
    async with attempted() as episode:
        await episode.act(FAKES[name])
        assert (await episode.verify()).reward == 0.0


async def test_whoever_answers_in_the_place_of_a_crashed_service_is_gone_before_the_check(
    attempted: Attempted,
) -> None:
    task = changed(TASK.model_copy(update={"check": f'[ "$(wget -qO- {URL})" = pear ]'}), state="")
    async with attempted(task) as episode:
        await episode.act(f"wget -qO- {URL}/die")
        answer = "printf 'HTTP/1.0 200 OK\\r\\n\\r\\npear\\n'"
        await episode.act(f"(while :; do {answer} | nc -l -p 8080; done) > /dev/null 2>&1 &")
        with pytest.raises(VerifierBrokenByAnswer, match="the service web is not healthy any more"):
            await episode.verify()


async def test_a_service_that_only_this_agent_brings_down_is_the_agents_doing(attempted: Attempted) -> None:
    async with attempted() as episode:
        await episode.act(f"wget -qO- {URL}/die")
        with pytest.raises(VerifierBrokenByAnswer, match="a known-good answer passes") as broken:
            await episode.verify()
    assert broken.value.evidence["service"] == "web" and "exit 1" in broken.value.evidence["its health check"]


async def test_a_service_that_a_known_good_answer_brings_down_as_well_is_nobodys_failure(attempted: Attempted) -> None:
    task = TASK.model_copy(update={"oracle": [f"wget -qO- {URL}/die"]})
    async with attempted(task) as episode:
        await episode.act(task.oracle[0])
        with pytest.raises(VerifierError, match="on a known-good answer: the service web is not healthy any more"):
            await episode.verify()


async def test_a_state_that_cannot_be_read_breaks_the_verdict_and_not_the_agent(attempted: Attempted) -> None:
    async with attempted(changed(state="head -c 70000 /dev/zero")) as episode:
        with pytest.raises(VerifierError, match="the state of the service web can't be read: exit 0: 70000 bytes"):
            await episode.verify()


async def test_a_service_whose_container_is_taken_away_is_infrastructure_and_named(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    async with attempted() as episode:
        docker(docker_host, "rm", "-f", container_of(backend, episode))
        with pytest.raises(SandboxError, match="the service web: the container was removed") as lost:
            await episode.act("true")
        assert not lost.value.retryable
        with pytest.raises(SandboxError, match="the service web: the container was removed"):
            await episode.verify()


async def test_a_lost_sandboxs_commands_are_run_again_beside_fresh_services(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    async with attempted() as episode:
        first = await episode.act(TASK.oracle[0], op_id="t0")
        docker(docker_host, "rm", "-f", episode.lease.container_id)
        message = AcquireInput(
            run="acts", group_id="acts/g0", attempt_id=episode.attempt, task=episode.task, generation=1
        )
        episode.lease = (await call(episode.activities.acquire, message)).lease
        assert len(everything(docker_host, run="acts")) == 2
        assert (await episode.act(f"wget -qO- {URL}")).output == "plum\n"
        entry = JournalEntry(
            turn=0, op_id="t0", command=TASK.oracle[0], step_timeout_s=5, ending="", output_digest=first.output_digest
        )
        replay = ReplayInput(lease=episode.lease, entries=[entry], max_output_chars=2000)
        assert (await call(episode.activities.replay, replay)).differs_at is None
        assert (await episode.verify()).passed


async def test_a_retried_acquire_starts_nothing_anew(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    async with attempted() as episode:
        await episode.act(TASK.oracle[0])
        before = container_of(backend, episode)
        await episode.acquire()
        assert container_of(backend, episode) == before and len(everything(docker_host, run="acts")) == 2
        assert (await episode.act(f"wget -qO- {URL}")).output == "pear"


async def test_a_service_that_does_not_get_healthy_says_why_and_leaves_nothing(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    with pytest.raises(
        SandboxError, match=r"the service web: it does not get healthy: exit 1.*it said: no such luck"
    ) as no:
        async with attempted(changed(start="echo no such luck; exit 3")):
            pass
    assert not no.value.retryable and everything(docker_host, run="acts") == []
    with pytest.raises(SandboxError, match="the service web: the setup of service web failed: exit 4"):
        async with attempted(changed(setup="exit 4")):
            pass
    assert everything(docker_host, run="acts") == []


async def test_services_go_with_their_sandbox_however_it_goes(
    backend: DockerBackend, attempted: Attempted, docker_host: str
) -> None:
    two = TASK.model_copy(update={"services": [WEB, changed(name="other", start="sleep 999").services[0]]})
    two.services[1] = two.services[1].model_copy(update={"healthcheck": Healthcheck(command="true")})
    async with attempted(two) as episode:
        assert len(everything(docker_host, run="acts")) == 3
        owned = [item for item in await backend.owned() if item.attempt == episode.attempt]
        assert {item.kind for item in owned} == {"agent", "service"} and len(owned) == 3
        assert (await call(episode.activities.sweep, SweepInput(run="acts"))).containers == 3
        assert everything(docker_host, run="acts") == []
    async with attempted() as episode:
        await backend.close(episode.lease.sandbox_id)
        assert everything(docker_host, run="acts") == []
    async with attempted() as episode:
        pass
    assert everything(docker_host, run="acts") == []
    assert backend.boxes.having("ratchet.attempt", episode.attempt) == []


async def test_a_sandbox_out_of_the_warm_pool_gets_its_services_too(docker_host: str, tmp_path: Path) -> None:
    backend = DockerBackend(docker_host, tmp_path / "state", slots=4, pool=1)
    try:
        await backend.keep_warm(await Machines(backend).spec(TASK))
        while not sum(backend.waiting().values()):
            await asyncio.sleep(0.1)
        activities = SandboxActivities(backend, lambda name: Only(TASK), host="here")
        episode = Episode(activities, TASK.id, "pooled/g0/e0/a0")
        await episode.acquire()
        assert backend.boxes.container(episode.lease.sandbox_id) != episode.lease.sandbox_id
        assert (await episode.act(f"wget -qO- {URL}")).output == "plum\n"
    finally:
        await backend.close_attempt("pooled/g0/e0/a0")
        await backend.aclose()


async def test_services_and_another_runtime_are_refused_together(backend: DockerBackend) -> None:
    """Two sandboxes of gVisor share no loopback."""
    activities = SandboxActivities(backend, lambda name: Only(TASK), host="here")
    task = TaskRef(taskset="tests", split=Split.TRAIN, task_id=TASK.id)
    message = AcquireInput(run="acts", group_id="acts/g0", attempt_id="acts/g0/e0/runc", task=task, runtime="runc")
    with pytest.raises(SandboxError, match="services need the daemon's own runtime"):
        await call(activities.acquire, message)


@pytest.mark.parametrize("task_id", ["look-up-1", "correct-9", "find-and-correct-2"])
async def test_the_examples_tasks_are_fit(backend: DockerBackend, docker_host: str, task_id: str) -> None:
    trial = Trial(backend)
    checked = await trial.check(open_taskset(str(EXAMPLE)).load(task_id), 0, lambda task, phase: None)
    assert (checked.findings, checked.nothing, checked.oracle, checked.again) == ([], 0.0, 1.0, 1.0)
    assert everything(docker_host, run=trial.run) == []


async def test_the_examples_oracles_see_what_their_files_say(backend: DockerBackend, attempted: Attempted) -> None:
    task = open_taskset(str(EXAMPLE)).load("find-and-correct-3")
    async with attempted(task) as episode:
        seen = [(await episode.act(command)).observation() for command in task.oracle]
        assert seen == [text.strip() for text in task.oracle_observations]
        assert "400 Bad Request" in (await episode.act("wget -qO- shop:8080/cgi-bin/orders/A")).output
        assert "404 Not Found" in (await episode.act("wget -qO- shop:8080/cgi-bin/orders/nowhere")).output
