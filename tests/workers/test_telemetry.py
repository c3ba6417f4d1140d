"""The metrics of real workers: the SDK's and ours on one page, where Prometheus and `ratchet status` find it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest_asyncio
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from tests.workflows.conftest import local_server, unique
from tests.workflows.fakes import World
from tests.workflows.runs import run_json, start
from workers import metrics
from workers.metrics import Meters, legal
from workers.settings import Settings
from workers.stack.control import _with_metrics
from workers.stack.endpoints import addresses, file_of, port_of
from workers.stack.ports import free_ports
from workers.stack.state import ROLES, Home
from workers.stack.status import PartState, PartStatus, StackStatus
from workers.telemetry import Telemetry, telemetry
from workers.temporal import plugin
from workflows.contracts import (
    FailureType,
    Queue,
    ReserveBatchInput,
    ReserveBatchOutput,
    UpdateInput,
    UpdateOutput,
    engine_queue,
)
from workflows.contracts.run import BatchWait
from workflows.registry import ON_CONTROL, ON_EPISODES


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[str]:
    async with local_server() as client:
        yield client.service_client.config.target_host


def settings(home: Path, port: int) -> Settings:
    return Settings(home=home, metrics_port=port)


async def page_of(told: Telemetry) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{told.address}/metrics")).text


def value(page: str, name: str, **labels: str) -> float | None:
    """Of the one sample with these labels among its own; None where there is none."""
    found = []
    for line in page.splitlines():
        if match := re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line):
            its = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
            if labels.items() <= its.items():
                found.append(float(match[2]))
    assert len(found) <= 1, (name, labels, found)
    return found[0] if found else None


@asynccontextmanager
async def workers(server: str, told: Telemetry, world: World) -> AsyncIterator[Client]:
    """All roles in one process, as far as their metrics go."""
    client = await Client.connect(server, plugins=[plugin(interceptors=told.interceptors)], runtime=told.runtime)
    async with AsyncExitStack() as stack:
        for queue, workflows in (
            (Queue.CONTROL, ON_CONTROL),
            (Queue.EPISODES, ON_EPISODES),
            (Queue.TRAINING, []),
            (engine_queue("h"), []),
        ):
            worker = Worker(client, task_queue=queue, workflows=workflows, activities=world.activities)
            await stack.enter_async_context(worker)
        yield client


def test_a_name_of_the_design_has_one_spelling_for_prometheus() -> None:
    assert legal("off_policy/effective_sample_size") == "ratchet_off_policy_effective_sample_size"
    assert legal("time/to_trainable_batch") == "ratchet_time_to_trainable_batch"
    assert re.fullmatch(r"[a-zA-Z_:][\w:]*", legal("weight-sync/pause.s"))


async def test_a_run_shows_on_one_page_with_what_the_sdk_measures(server: str, tmp_path: Path) -> None:
    world, run = World(), unique("run")
    world.answer = lambda m: UpdateOutput(
        step=m.step,
        checkpoint=f"c{m.step}",
        metrics={"loss": -0.25, "mismatch_kl/mean": 1e-6, "off_policy/steps": 1.0},
        warning="mismatch_kl is high" if m.step == 2 else "",
    )
    broken = []

    def fail(name: str, message: object) -> None:
        if name == "generate" and not broken:
            broken.append(name)
            raise ApplicationError("scripted", type=FailureType.ENGINE)

    world.fail = fail
    async with telemetry(settings(tmp_path, *free_ports(1)), "control") as told, workers(server, told, world) as client:
        await (await start(client, run_json(training={"steps": 2}, evaluation={"tasks": 1}), run)).result()
        page = await page_of(told)
    assert value(page, "ratchet_step", run=run) == value(page, "ratchet_policy_version", run=run) == 2
    assert value(page, "ratchet_run_state", run=run, state="finished") == 1
    assert value(page, "ratchet_run_state", run=run, state="running") == 0
    assert value(page, "ratchet_loss", run=run) == -0.25
    assert value(page, "ratchet_mismatch_kl_mean", run=run) == 1e-6
    assert value(page, "ratchet_update_warning", run=run) == 1
    assert value(page, "ratchet_batches_total", run=run, state="trained") == 2
    played = len([record for record in world.calls["record_episode"] if record.run == run])
    counted = re.findall(rf'ratchet_outcome_total\{{[^}}]*run="{run}"[^}}]*\}} (\d+)', page)
    assert sum(map(int, counted)) == played > 0
    assert value(page, "ratchet_groups_closed_total", run=run, reason="eligible") is not None
    assert value(page, "ratchet_weight_sync_pause_s", run=run, engine="h-e0") == 0.1
    assert value(page, "ratchet_weight_sync_loads_total", run=run, engine="h-e0", proven="true") == 3
    assert value(page, "ratchet_weight_sync_served_version", run=run, engine="h-e0") == 2
    assert value(page, "ratchet_evaluation_version", run=run) == 2
    assert value(page, "ratchet_activities_total", activity="generate", ended=FailureType.ENGINE.value) == 1
    assert "temporal_activity_schedule_to_start_latency_bucket{" in page
    assert "temporal_worker_task_slots_used{" in page


async def test_what_a_batch_waited_for_is_there_part_by_part(server: str, tmp_path: Path) -> None:
    recorded = BatchWait(seconds=12.5, parts={"generate": 10.0, "act": 2.5}, median_s=6.0, tail_s=1.5)
    async with telemetry(settings(tmp_path, *free_ports(1)), "control") as told:
        recorder = metrics.Recorder(Meters(told.runtime.metric_meter))
        message = ReserveBatchInput(run="r", step=1, policy_version=0, groups=[], dropped={"too_stale": [3, 4]})
        answer = ReserveBatchOutput(batch_id="r/b1", episodes=4, reward=0.5, wait=recorded)
        recorder.ended("reserve_batch", [message], answer)
        made = UpdateOutput(step=1, checkpoint="c", metrics={"entropy": math.nan, "advantage/min": -1.0})
        recorder.ended("update", [UpdateInput(run="r", config={}, batch_id="b", step=1, policy_version=0)], made)
        page = await page_of(told)
    assert value(page, "ratchet_time_to_trainable_batch", run="r") == 12.5
    assert value(page, "ratchet_time_part", run="r", part="generate") == 10.0
    assert value(page, "ratchet_time_tail", run="r") == 1.5
    assert value(page, "ratchet_reward_batch", run="r") == 0.5
    assert value(page, "ratchet_groups_dropped_total", run="r", reason="too_stale") == 2
    assert value(page, "ratchet_advantage_min", run="r") == -1.0
    assert value(page, "ratchet_entropy", run="r") is None, "no number at all"


async def test_gauges_follow_their_source_and_one_that_fails_hides_no_other(tmp_path: Path) -> None:
    async def broken() -> list[metrics.Sample]:
        raise OSError("the daemon is away")

    async def good() -> list[metrics.Sample]:
        return [metrics.Sample("sandboxes", 3, {"state": "taken"})]

    async with telemetry(settings(tmp_path, *free_ports(1)), "rollout") as told:
        told.watch(broken)
        told.watch(good)
        sampling = asyncio.create_task(told.sample())
        async with asyncio.timeout(30):
            while value(page := await page_of(told), "ratchet_sandboxes", state="taken") is None:
                await asyncio.sleep(0.02)
        sampling.cancel()
    assert value(page, "ratchet_sandboxes", state="taken") == 3


async def test_a_taken_port_is_replaced_by_a_free_one_that_is_written_down(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        async with telemetry(settings(tmp_path, wanted), "control") as told:
            assert told.address and told.address != f"127.0.0.1:{wanted}"
            assert (await page_of(told)) is not None
            assert addresses(tmp_path) == {"control": f"http://{told.address}/metrics"}
            (target,) = json.loads(file_of(tmp_path, "control").read_text())
            assert target == {"targets": [told.address], "labels": {"role": "control", "host": "local"}}
    assert addresses(tmp_path) == {}


async def test_port_0_serves_nothing_and_adds_nothing_to_an_activity(tmp_path: Path) -> None:
    async with telemetry(settings(tmp_path, 0), "control") as told:
        assert (told.address, told.interceptors) == ("", [])
    assert addresses(tmp_path) == {}


def test_roles_have_ports_one_after_the_other_and_engines_are_scraped_as_well(tmp_path: Path) -> None:
    from workers.stack.endpoints import targets

    ours = Settings(home=tmp_path, metrics_port=9000, engines="local-e0=http://127.0.0.1:9721,far-e0=http://far:9721")
    assert [port_of(ours, role) for role in ROLES] == list(range(9000, 9000 + len(ROLES)))
    own, engine = targets(ours, "engines", "127.0.0.1:9003")
    assert own["labels"] == {"role": "engines", "host": "local"}
    assert engine == {"targets": ["127.0.0.1:9721"], "labels": {"role": "vllm", "host": "local", "engine": "local-e0"}}


def test_status_shows_where_the_metrics_of_a_living_worker_are(tmp_path: Path) -> None:
    home = Home(tmp_path)
    file_of(tmp_path, "rollout").parent.mkdir()
    for role in ("rollout", "trainer"):
        file_of(tmp_path, role).write_text('[{"targets": ["127.0.0.1:9832"], "labels": {}}]')
    parts = [
        PartStatus(name="rollout", state=PartState.HEALTHY, pid=7),
        PartStatus(name="trainer", state=PartState.RESTARTING),
    ]
    shown = _with_metrics(home, StackStatus(supervisor_pid=1, written=0, parts=parts)).parts
    assert [part.address for part in shown] == ["metrics http://127.0.0.1:9832/metrics", ""]
