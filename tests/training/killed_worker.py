"""A trainer's process that kills itself between the upload of step 2 and its manifest. Started by a test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import torch

from activities.training import checkpoints
from tests.training.worlds import World


async def main() -> None:
    given = json.load(sys.stdin)
    torch.set_num_threads(1)
    world = World.told(given)
    await world.start()
    await world.update(1)
    checkpoints.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    await world.update(2)


if __name__ == "__main__":
    asyncio.run(main())
