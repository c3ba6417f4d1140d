"""Bring a stack up, take it down, tell how it stands: what `ratchet up`, `down` and `status` do, without a terminal.

`say` gets one line at a time for the person who waits. Failures are `StackError`s whose text is the whole message.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from workers.settings import Settings, UpOptions, inherited_environment
from workers.stack import logs, ports
from workers.stack.endpoints import addresses
from workers.stack.parts import import_path
from workers.stack.process import Process, read_pid_file, spawn
from workers.stack.runner import retire
from workers.stack.state import INFRASTRUCTURE, PARTS, Home, Ports, Stack, scratch_root
from workers.stack.status import PartState, PartStatus, StackStatus
from workers.supervisor import LOCKED, NAME

Say = Callable[[str], None]

PROGRESS_S = 2.0
UP_S = 600.0
DOWN_S = 150.0
TRIES = 3
"""Starts in a row that may fail before `up` gives its verdict; the supervisor goes on trying."""


class StackError(Exception):
    """Why the stack is not as asked; the text is for the user."""


def merge(stack: Stack | None, options: UpOptions, settings: Settings) -> Stack:
    """The stack that `options` ask for, on top of what the folder remembers. Raises StackError for an unknown part."""
    base = stack or Stack(host=settings.host)
    names = {
        "temporal": options.temporal_port,
        "temporal_http": options.temporal_http_port,
        "temporal_metrics": options.temporal_metrics_port,
        "ui": options.ui_port,
        "s3": options.s3_port,
        "engine": options.engine_port,
        "metrics": options.metrics_port,
    }
    chosen = {name: port for name, port in names.items() if port is not None}
    parts = base.parts
    if options.parts is not None:
        asked = {item.strip() for item in options.parts.split(",") if item.strip()}
        if unknown := asked - set(PARTS):
            raise StackError(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        parts = tuple(part for part in PARTS if part in asked) or PARTS
    wanted = Stack(
        host=base.host,
        engines=base.engines if options.engine_count is None else options.engine_count,
        ports=Ports.model_validate({**base.ports.model_dump(), **chosen}),
        parts=parts,
    )
    return wanted.with_settings(settings)


def up(home: Home, options: UpOptions, say: Say, *, timeout_s: float = UP_S) -> tuple[Stack, bool]:
    """Start the stack unless it is up, and wait until every part is healthy.

    Returns the stack and whether it was up already. Raises StackError: a port is taken, a part does not come up, or
    the stack is up with other options.
    """
    home.create()
    remembered = home.load_stack()
    wanted = merge(remembered, options, Settings(home=home.path))
    supervisor = running_supervisor(home)
    if supervisor is not None:
        if remembered is not None and wanted != remembered:
            raise StackError(
                "the stack is up with other options; run `ratchet down` first, then `ratchet up` with these"
            )
        status = read_status(home)
        already = status is not None and status.good
        _wait(home, supervisor, None, say, timeout_s)
        return wanted, already
    _refuse_taken_ports(home, wanted)
    home.save_stack(wanted)
    if wanted.has("s3"):
        home.load_keys()
    started, child = spawn(
        [sys.executable, "-m", "workers.supervisor", "--home", str(home.path)],
        env={**inherited_environment(), "PYTHONPATH": import_path(inherited_environment()), "PYTHONUNBUFFERED": "1"},
        cwd=home.path,
        log=home.log(NAME),
    )
    _wait(home, started, child, say, timeout_s)
    return wanted, False


def down(home: Home, say: Say) -> bool:
    """End the stack in the reverse order of its start; False if nothing ran. Bounded by about three minutes."""
    supervisor = running_supervisor(home)
    if supervisor is not None:
        _end_supervisor(home, supervisor, say)
    left = sorted(home.pids.glob("*.json"), key=lambda file: file.stem in INFRASTRUCTURE)
    for infrastructure in (False, True):
        files = [file for file in left if (file.stem in INFRASTRUCTURE) == infrastructure]
        for file in files:
            say(f"ending {file.stem}, which no supervisor watched")
        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(lambda file: retire(file), files))
    home.status.unlink(missing_ok=True)
    shutil.rmtree(scratch_root(home.path), ignore_errors=True)
    return supervisor is not None or bool(left)


def running_supervisor(home: Home) -> Process | None:
    process = read_pid_file(home.lock)
    return process if process is not None and process.alive else None


def read_status(home: Home) -> StackStatus | None:
    """How the parts stand: the supervisor's word, or what pid files show when it is gone. None for no stack at all."""
    supervisor = running_supervisor(home)
    if supervisor is not None and home.status.is_file():
        status = StackStatus.model_validate_json(home.status.read_text())
        if status.supervisor_pid == supervisor.pid:
            return _with_metrics(home, status)
        return StackStatus(supervisor_pid=supervisor.pid, written=time.time(), parts=[PartStatus(name=NAME)])
    found = [(file.stem, read_pid_file(file)) for file in sorted(home.pids.glob("*.json"))]
    parts = [
        PartStatus(
            name=name,
            state=PartState.UNSUPERVISED if process.alive else PartState.STOPPED,
            detail="the supervisor is gone; `ratchet up` takes over",
            pid=process.pid if process.alive else None,
            since=process.since,
            log=str(home.log(name)),
        )
        for name, process in found
        if process is not None
    ]
    return StackStatus(supervisor_pid=0, written=time.time(), parts=parts) if parts else None


def _with_metrics(home: Home, status: StackStatus) -> StackStatus:
    """The workers' addresses are what they serve their metrics at, which they know only once they run."""
    found = addresses(home.path)
    parts = [
        part.model_copy(update={"address": f"metrics {found[part.name]}"}) if part.name in found and part.pid else part
        for part in status.parts
    ]
    return status.model_copy(update={"parts": parts})


def _refuse_taken_ports(home: Home, stack: Stack) -> None:
    def ours(part: str) -> bool:
        process = read_pid_file(home.pid_file(part))
        return process is not None and process.alive

    found = ports.clashes([need for need in ports.needs(stack) if not ours(need.part)])
    if found:
        raise StackError("\n".join(found))


def _wait(home: Home, supervisor: Process, child: subprocess.Popen[bytes] | None, say: Say, timeout_s: float) -> None:
    """Until every part is good. `child` is the supervisor where this process started it, and must reap it."""
    began = said = time.monotonic()
    first: dict[str, int] = {}
    while True:
        code = child.poll() if child is not None else None
        if code == LOCKED:
            # Another `up` was quicker; its supervisor is as good as ours.
            other = running_supervisor(home)
            supervisor, child = other or supervisor, None
        elif not supervisor.alive:
            raise StackError(_with_tail("the supervisor ended", home, NAME))
        status = read_status(home)
        parts = status.parts if status is not None and status.supervisor_pid == supervisor.pid else []
        if parts and all(part.state.good for part in parts):
            return
        for part in parts:
            failures = part.restarts - first.setdefault(part.name, part.restarts)
            if part.state is PartState.MISSING or (failures >= TRIES and not part.state.good):
                raise StackError(_with_tail(f"{part.name} does not come up: {part.detail}", home, part.name))
        now = time.monotonic()
        waiting = ", ".join(f"{part.name} ({part.detail or part.state})" for part in parts if not part.state.good)
        if now - began > timeout_s:
            raise StackError(f"not up after {timeout_s:.0f} s; still waiting for {waiting or 'the supervisor'}")
        if now - said >= PROGRESS_S:
            said = now
            say(f"{now - began:4.0f} s  waiting for {waiting or 'the supervisor'}")
        time.sleep(0.1)


def _end_supervisor(home: Home, supervisor: Process, say: Say) -> None:
    supervisor.signal(signal.SIGTERM)
    began = said = time.monotonic()
    while supervisor.alive:
        now = time.monotonic()
        if now - began > DOWN_S:
            say(f"the supervisor did not end in {DOWN_S:.0f} s and is killed")
            supervisor.signal(signal.SIGKILL)
            said = now
        elif now - said >= PROGRESS_S:
            said = now
            status = read_status(home)
            left = [part.name for part in status.parts if part.pid is not None] if status else []
            say(f"{now - began:4.0f} s  ending {', '.join(left) or 'the supervisor'}")
        time.sleep(0.1)


def _with_tail(message: str, home: Home, part: str) -> str:
    log = home.log(part)
    last = logs.tail(log)
    return f"{message}\n--- end of {log}\n{last}" if last else message
