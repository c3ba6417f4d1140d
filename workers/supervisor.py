"""The supervisor of one host's stack: `python -m workers.supervisor --home FOLDER`, started by `ratchet up`.

Brings the parts up stage by stage, keeps each running (workers/stack/runner.py), bounds their logs and writes
`status.json`. One per state folder: a lock says so. Its own death ends no part: the next supervisor takes them over,
so runs go on meanwhile. SIGTERM ends everything in the reverse order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from workers.settings import Settings, inherited_environment
from workers.stack import logs
from workers.stack.parts import Part, environment, stages
from workers.stack.process import identify, write_atomically
from workers.stack.runner import Runner, retire
from workers.stack.state import Home
from workers.stack.status import StackStatus

log = logging.getLogger("supervisor")

NAME = "supervisor"
LOCKED = 3
"""Exit code when another supervisor holds the state folder."""
UPKEEP_S = 2.0


class Supervisor:
    """Runs `stages` until it is told to stop."""

    def __init__(self, home: Home, stages: Sequence[Sequence[Part]], env: Mapping[str, str]) -> None:
        self._home = home
        self._stopping = asyncio.Event()
        self._dirty = asyncio.Event()
        self._stages = [
            [Runner(part, home=home, env=env, changed=self._dirty.set) for part in stage] for stage in stages
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Raises what a part's runner raises: a bug here ends the supervisor, never the parts."""
        upkeep = asyncio.create_task(self._upkeep())
        await asyncio.to_thread(self._retire_strangers)
        bring_up = asyncio.create_task(self._bring_up())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not stopping.done():
                mine = [upkeep, bring_up, *self._tasks]
                pending = [task for task in mine if not task.done()]
                await asyncio.wait([stopping, *pending], timeout=UPKEEP_S, return_when=asyncio.FIRST_COMPLETED)
                for task in mine:
                    if task.done():
                        task.result()
            bring_up.cancel()
            await self._take_down()
        finally:
            upkeep.cancel()
            self._write_status()

    async def _bring_up(self) -> None:
        for stage in self._stages:
            self._tasks += [asyncio.create_task(runner.run()) for runner in stage]
            await asyncio.gather(*(runner.ready.wait() for runner in stage))
        log.info("all parts are up")

    async def _take_down(self) -> None:
        log.info("stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stage in reversed(self._stages):
            await asyncio.gather(*(runner.stop() for runner in stage))
        log.info("stopped")

    def _retire_strangers(self) -> None:
        """End parts of an earlier configuration, such as an engine too many."""
        known = {runner.part.name for stage in self._stages for runner in stage}
        for pid_file in self._home.pids.glob("*.json"):
            if pid_file.stem not in known:
                log.info("%s: no longer wanted", pid_file.stem)
                retire(pid_file)

    async def _upkeep(self) -> None:
        """Write the status at once when it changes, and bound the logs."""
        while True:
            self._dirty.clear()
            self._write_status()
            for file in self._home.logs.glob("*.log"):
                # A full disk must not take the supervisor down with it.
                with contextlib.suppress(OSError):
                    logs.rotate(file)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dirty.wait(), UPKEEP_S)
            await asyncio.sleep(0.05)

    def _write_status(self) -> None:
        parts = [runner.status for stage in self._stages for runner in stage]
        status = StackStatus(supervisor_pid=os.getpid(), written=time.time(), parts=parts)
        with contextlib.suppress(OSError):
            write_atomically(self._home.status, status.model_dump_json())


def take_lock(home: Home) -> TextIO | None:
    """The state folder's lock, held while the file is open; None if taken. The file names its holder."""
    file = home.lock.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    me = identify(os.getpid())
    file.truncate(0)
    file.write(me.model_dump_json() if me else "")
    file.flush()
    return file


async def supervise(home: Home, stages: Sequence[Sequence[Part]], env: Mapping[str, str]) -> None:
    """Run until SIGTERM or SIGINT."""
    supervisor = Supervisor(home, stages, env)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Supervisor of a Ratchet stack; `ratchet up` starts it.")
    parser.add_argument("--home", type=Path, required=True)
    home = Home(parser.parse_args(arguments).home.resolve())
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stack = home.load_stack()
    if stack is None:
        raise SystemExit(f"{home.path} holds no stack; `ratchet up` makes one")
    lock = take_lock(home)
    if lock is None:
        return LOCKED
    with lock:
        keys = home.load_keys() if stack.has("s3") else {}
        env = environment(home, stack, keys, inherited_environment())
        asyncio.run(supervise(home, stages(home, stack, keys, Settings(home=home.path)), env))
        lock.truncate(0)
    home.status.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
