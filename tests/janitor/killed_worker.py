"""A rollout worker to be killed: `python -m tests.janitor.killed_worker ADDRESS QUEUE DOCKER_HOST STATE`.

It has real sandboxes and an engine that never answers.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from tasksets import open_taskset
from workers.parts import methods
from workers.temporal import plugin
from workflows.contracts import GenerateInput, GenerateOutput
from workflows.episode import Episode


@activity.defn(name="generate")
async def silent(message: GenerateInput) -> GenerateOutput:
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


async def main() -> None:
    address, queue, docker_host, state = sys.argv[1:]
    client = await Client.connect(address, plugins=[plugin()])
    sandbox = SandboxActivities(DockerBackend(docker_host, Path(state), slots=4), open_taskset, "h")
    async with Worker(client, task_queue=queue, workflows=[Episode], activities=[silent, *methods(sandbox)]):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
