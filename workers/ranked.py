"""`python -m workers.ranked`: becomes DeepSpeed's launcher of the trainer's processes on this host.

Rank 0 is the trainer's worker, the others follow it (activities/training/ranks.py). When one ends, the launcher ends
all, and the supervisor starts them anew.
"""

from __future__ import annotations

import base64
import json
import os
import sys

from activities.lifetime import RANKED
from workers.settings import Settings
from workers.stack.ports import free_ports
from workers.stack.state import LOOPBACK


def command(processes: int, port: int, *module: str) -> list[str]:
    """The launcher's arguments: one host, as many local ranks as processes, each `python -m` with `module`."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(processes))}).encode()).decode()
    options = {"world_info": world, "master_addr": LOOPBACK, "master_port": port}
    given = [f"--{name}={value}" for name, value in options.items()]
    return ["-m", "deepspeed.launcher.launch", *given, "--no_local_rank", "--module", *module]


def main() -> None:
    (port,) = free_ports(1)
    os.environ[RANKED] = "1"
    os.execv(sys.executable, [sys.executable, *command(Settings().trainer_processes, port, "workers.roles", "trainer")])


if __name__ == "__main__":
    main()
