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
from activities.training.checkpoints import save_training_state
from activities.training.engine import Trainer
from activities.training.ranks import everywhere, follow, rank
from tests.training.worlds import World


class Left(Exception):
    """A run is left where it stands: its processes die soon."""


def die(number: int) -> None:
    if rank() == number:
        os.kill(os.getpid(), signal.SIGKILL)


async def lead(asked: dict[str, Any], folder: Path) -> None:
    """Make a run's updates; by step its metrics, and the weights after each, go into the folder. Between the gradient
    steps of update `dies_in` and its checkpoint, rank 1 dies; at the same place of `left_in` the next run begins."""
    world = World.told(asked)
    try:
        done = await updates(world, asked, folder)
    except Left:
        return
    finally:
        training_activities.save_training_state = save_training_state
        world.service.close()
    (folder / "done.json").write_text(json.dumps(done))


async def updates(world: World, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    done: dict[str, Any] = {}
    if asked["start"]:
        done["world_size"] = (await world.start()).world_size

    def killed(*arguments: Any, **named: Any) -> Any:
        everywhere(die, 1)
        return save_training_state(*arguments, **named)

    def left(*arguments: Any, **named: Any) -> Any:
        raise Left

    for step in asked["steps"]:
        if step == asked.get("dies_in"):
            training_activities.save_training_state = killed
        if step == asked.get("left_in"):
            training_activities.save_training_state = left
        output = await world.update(step)
        done[str(step)] = output.metrics
        trainer = world.service._trainer
        assert trainer is not None
        save_file(everywhere(Trainer.weights, trainer), folder / f"{step}.safetensors")
        if asked["score"] and step == 1:
            done["divergences"] = (await world.score(output.checkpoint, *asked["score"])).divergences
    return done


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
