"""The process of an agent program: started with its variables in a folder of its own, and ended with all it started.

Promises: the program sees of the worker's environment its PATH alone, none of the stack's keys; it ends with the
worker; of its output the last OUTPUT_BYTES are kept. Model-made commands are not run here: what the program does for
the policy it does through `sandbox`. Used by the run_agent activity.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from activities.agents.endpoint import Access
from activities.generation.server import SERVED_NAME
from workflows.contracts import AgentProgram

HERE = Path(__file__).parent
OUTPUT_BYTES = 64 << 10
LAST_WORDS_S = 2.0
"""For output that comes after the end, from what the program left behind."""
LONGEST_VARIABLE = 100_000
KILLED = 128 + signal.SIGKILL


class Running(Protocol):
    """A program that was started, wherever that is."""

    answer: str
    """What it has left in its answer file, once `end` is over."""

    async def ended(self) -> int:
        """Its exit code, KILLED where somebody killed it."""
        ...

    async def end(self) -> None:
        """Kill it, if it still runs, with all that it started."""
        ...

    @property
    def output(self) -> bytes:
        """The end of what it printed."""
        ...


class Program:
    """One that runs on this machine. `answer_file` is where it may leave its answer."""

    def __init__(self, process: asyncio.subprocess.Process, answer_file: Path) -> None:
        self._process = process
        self._answer_file = answer_file
        self.answer = ""
        self._output = bytearray()
        self._reading = asyncio.create_task(self._read())

    async def ended(self) -> int:
        code = await self._process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), LAST_WORDS_S)
        return code

    async def end(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
        self._reading.cancel()
        self.answer = self._answer()

    @property
    def output(self) -> bytes:
        return bytes(self._output)

    def _answer(self) -> str:
        try:
            with self._answer_file.open("rb") as file:
                return file.read(OUTPUT_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            self._output += data
            del self._output[:-OUTPUT_BYTES]


@asynccontextmanager
async def started(
    program: AgentProgram, access: Access, *, instruction: str, path: str, spool: Path
) -> AsyncIterator[Program]:
    """The program for the time of the block; `path` is its PATH, behind the folder with `sandbox` and `docker`."""
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    await asyncio.to_thread(_sweep, spool)
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=spool, prefix=f"{os.getpid()}-"))
    running: Program | None = None
    try:
        answer_file = folder / "answer"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-S",
            "-E",
            str(HERE / "launcher.py"),
            str(os.getpid()),
            program.command,
            cwd=_home(folder),
            env=_variables(program.env, access, folder, instruction=instruction, path=path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        running = Program(process, answer_file)
        yield running
    finally:
        if running is not None:
            await running.end()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _sweep(spool: Path) -> None:
    """Remove the folders of workers that are gone."""
    for folder in spool.iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _home(folder: Path) -> Path:
    home = folder / "home"
    home.mkdir()
    return home


def _variables(own: Mapping[str, str], access: Access, folder: Path, *, instruction: str, path: str) -> dict[str, str]:
    """The program's whole environment. `own` goes over what is here."""
    commands = folder / "bin"
    commands.mkdir()
    for kind in ("sandbox", "docker"):
        script = commands / kind
        words = shlex.join([sys.executable, "-S", "-E", str(HERE / "sandbox_command.py"), kind])
        script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        script.chmod(0o700)
    instruction = instruction.replace("\0", "\ufffd")
    task = folder / "instruction"
    task.write_text(instruction)
    return {
        "PATH": f"{commands}:{path}",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1,localhost",
        "OPENAI_BASE_URL": f"{access.url}/v1",
        "OPENAI_API_BASE": f"{access.url}/v1",
        "OPENAI_API_KEY": access.key,
        "RATCHET_URL": access.url,
        "RATCHET_KEY": access.key,
        "RATCHET_MODEL": SERVED_NAME,
        # Linux starts nothing with a longer variable.
        "RATCHET_INSTRUCTION": instruction if len(instruction.encode()) < LONGEST_VARIABLE else "",
        "RATCHET_INSTRUCTION_FILE": str(task),
        "RATCHET_ANSWER_FILE": str(folder / "answer"),
        "RATCHET_SANDBOX": str(commands / "sandbox"),
        "RATCHET_DOCKER": str(commands / "docker"),
        **own,
    }
