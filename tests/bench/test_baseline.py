"""The synchronous collector does its work: real containers, the workload's image, an engine at the HTTP seam."""

from __future__ import annotations

from pathlib import Path

import aiodocker
import pytest
from aiohttp.test_utils import TestServer

from activities.generation.engine import EngineClient
from activities.generation.transcript import Template
from bench.baseline import SynchronousCollector, leftovers
from bench.collection import load_image
from bench.durability import LIMITS, tokenizer_folder
from bench.long_tail import Tail, load_of, write_folder
from bench.stub_engine import TURNS, StubEngine
from tasksets import open_taskset
from tests.sandbox.conftest import docker_host as docker_host
from workflows.contracts import EngineInfo, Split, TaskRef

pytestmark = pytest.mark.docker


async def test_a_batch_ends_when_all_its_groups_have_and_leaves_no_container(docker_host: str, tmp_path: Path) -> None:
    template = Template.load(str(tokenizer_folder(tmp_path / "model")))
    tail = Tail(median_s=0.3)
    folder = str(write_folder(tmp_path / "tasks", await load_image(docker_host), 0, tail))
    paces = {task_id: load_of(task_id, 0, tail).pace_s for task_id in open_taskset(folder).ids(Split.TRAIN)}
    fast = min(paces, key=lambda task_id: paces[task_id])
    slow = next(task_id for task_id, pace_s in paces.items() if 1 <= pace_s < 1.5)
    tasks = [TaskRef(taskset=folder, split=Split.TRAIN, task_id=task_id) for task_id in (fast, slow)]
    async with (
        TestServer(StubEngine(template, "run:0").application()) as server,
        aiodocker.Docker(url=docker_host or None) as docker,
    ):
        engine = EngineClient(EngineInfo(name="local-e0", host="local", url=str(server.make_url(""))))
        collector = SynchronousCollector(
            [engine], docker, template, open_taskset(folder), LIMITS, state=tmp_path, most=4
        )
        found = await collector.batch(tasks, first=5, group_size=2, seed=1)
        left = await leftovers(docker, tmp_path)
        await engine.close()
    assert left == []
    assert sorted(found.closed_s) == [5, 6]
    assert found.seconds >= max(found.closed_s.values())
    assert [len(played.turns) for played in found.episodes] == [TURNS] * 4
    # Three commands, each of which waits for as long as the task's environment says.
    assert found.closed_s[6] >= (TURNS - 1) * paces[slow]
    assert all(turn.prefix for played in found.episodes for turn in played.turns[1:])
