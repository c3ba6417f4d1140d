"""A rollout worker to be killed: the Episode workflow with real sandboxes and real generation from a fake engine.

`serve` is the process: it polls until it is killed, and appends what it begins to the file `log`: `generate`, `act` and
so on as activities begin, `ready` once it polls. The record of the episode goes to the file `record`. The engine
answers turn n of its script by counting the answers in its prompt.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    Worker,
)

from activities.agents.activities import AgentActivities
from activities.agents.endpoint import AgentEndpoint
from activities.generation.activities import GenerationActivities
from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from storage.objects import ObjectStore
from tasksets import open_taskset
from tests.generation.fakes import FakeEngine, choice
from tests.generation.policies import CHATML, make_tokenizer
from tests.generation.test_routing import pool_of
from workers.parts import methods
from workers.temporal import plugin
from workflows import policies
from workflows.contracts import EpisodeRecord
from workflows.episode import Episode

HEARTBEAT = timedelta(seconds=1)


class Log(Interceptor):
    """Writes down which activity begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Logged(next, self)


class _Logged(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, log: Log) -> None:
        super().__init__(next)
        self._log = log

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        self._log.write(activity.info().activity_type)
        return await super().execute_activity(input)


class Records:
    def __init__(self, path: Path) -> None:
        self._path = path

    @activity.defn
    async def record_episode(self, message: EpisodeRecord) -> None:
        self._path.write_text(message.model_dump_json())


def scripted_engine(run: str, answers: list[str], delay_s: float) -> FakeEngine:
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    begin = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    engine = FakeEngine()
    engine.label, engine.delay_s = f"{run}:3", delay_s

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["token_ids"]
        turn = sum(prompt[at : at + len(begin)] == begin for at in range(len(prompt))) - 1
        ids = [*tokenizer.encode(answers[turn], add_special_tokens=False), tokenizer.eos_token_id]
        return choice(ids, (engine.label, 0, len(ids)))

    engine.answer = answer
    return engine


async def _poll(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    # A killed worker is noticed at once, so that a test may kill many.
    policies.GENERATE = replace(policies.GENERATE, heartbeat=HEARTBEAT)
    policies.SANDBOX = replace(policies.SANDBOX, heartbeat=HEARTBEAT)
    policies.AGENT = replace(policies.AGENT, heartbeat=HEARTBEAT)
    log = Log(folder / "log")
    engine = scripted_engine(given["run"], given["answers"], given["delay_s"])
    backend = DockerBackend(given["docker_host"], Path(given["state"]), slots=4)
    sandbox = SandboxActivities(backend, open_taskset, "here")
    store, endpoint = ObjectStore.connect(**given["store"]), AgentEndpoint()
    generation = GenerationActivities(pool_of(engine), store, open_taskset)
    agents = AgentActivities(
        generation,
        sandbox.act,
        store,
        open_taskset,
        endpoint,
        spool=folder / "agents",
        path=os.environ["PATH"],
        host=backend,
    )
    client = await Client.connect(given["temporal"], plugins=[plugin()])
    worker = Worker(
        client,
        task_queue=given["queue"],
        # The default reads every module, and with them all that transformers imports at a touch: half a minute.
        build_id="tests",
        workflows=[Episode],
        activities=[
            method
            for instance in (sandbox, generation, agents, Records(folder / "record"))
            for method in methods(instance)
        ],
        interceptors=[log],
        sticky_queue_schedule_to_start_timeout=timedelta(milliseconds=300),
    )
    async with endpoint, worker:
        log.write("ready")
        await asyncio.Event().wait()


def serve(given: dict[str, Any]) -> None:
    asyncio.run(_poll(given))
