"""A trainer of several processes, as the stack starts it: rank 0 makes the updates that a test asks for, run after run.

Started by a test under DeepSpeed's launcher with a file that says what to do; what came of it lies beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from activities.lifetime import end_with_parent
from activities.training import activities as training_activities
from activities.training.engine import Trainer
from activities.training.ranks import everywhere, follow, rank
from tests.training.worlds import World


def die(number: int) -> None:
    if rank() == number:
        os.kill(os.getpid(), signal.SIGKILL)


async def lead(asked: dict[str, Any], folder: Path) -> None:
    """Make a run's updates; by step its metrics, and the weights after each, go into the folder."""
    world = World.told(asked)
    done: dict[str, Any] = {}
    if asked["start"]:
        done["world_size"] = (await world.start()).world_size
    save = training_activities.save_training_state

    def killed(*arguments: Any, **named: Any) -> Any:
        everywhere(die, 1)
        return save(*arguments, **named)

    for step in asked["steps"]:
        if step == asked.get("dies_in"):
            training_activities.save_training_state = killed
        output = await world.update(step)
        done[str(step)] = output.metrics
        trainer = world.service._trainer
        assert trainer is not None
        save_file(everywhere(Trainer.weights, trainer), folder / f"{step}.safetensors")
        if asked["score"] and step == 1:
            done["divergences"] = (await world.score(output.checkpoint, *asked["score"])).divergences
    world.service.close()
    (folder / "done.json").write_text(json.dumps(done))


async def lead_all(path: Path) -> None:
    for name, asked in json.loads(path.read_text()).items():
        folder = path.parent / name
        folder.mkdir()
        await lead(asked, folder)


def main() -> None:
    end_with_parent()
    torch.set_num_threads(1)
    if rank():
        follow()
    asyncio.run(lead_all(Path(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
