from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from workers.stack.process import Process, forget_dead, identify, kill_leftovers, spawn, stop_now

from .conftest import SLEEP

READY = "print('ready', flush=True); time.sleep(600)"
IGNORES_TERM = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
WITH_HELPER = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {READY}"


def start(code: str, tmp_path: Path) -> Process:
    log = tmp_path / "log"
    process, child = spawn([sys.executable, "-S", "-c", code], env=dict(os.environ), cwd=tmp_path, log=log)
    if "ready" in code:
        while "ready" not in log.read_text():
            assert child.poll() is None
            time.sleep(0.01)
    return process


def test_a_process_is_known_again_by_pid_start_and_boot(tmp_path: Path) -> None:
    process = start(SLEEP, tmp_path)
    assert process.alive
    again = identify(process.pid)
    assert again is not None and again.started == process.started
    stop_now(process, seconds=2)
    assert not process.alive


def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    process = start(SLEEP, tmp_path)
    process.signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}").exists(), "not reaped yet"
    assert not process.alive


def test_another_process_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    process = start(SLEEP, tmp_path)
    for stranger in (
        process.model_copy(update={"started": process.started - 1}),
        process.model_copy(update={"boot": "an earlier boot"}),
    ):
        assert not stranger.alive
        stop_now(stranger, seconds=0.1)
        assert stranger.leftovers() == []
    assert process.alive
    stop_now(process, seconds=2)


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = start(IGNORES_TERM, tmp_path)
    stop_now(process, seconds=0.1)
    assert not process.alive


def test_what_a_killed_process_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    process = start(WITH_HELPER, tmp_path)
    process.signal(signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)
    left = process.leftovers()
    assert len(left) == 1
    assert kill_leftovers(process) == 1
    while left[0].alive:
        time.sleep(0.01)
    assert process.leftovers() == []


def test_a_pid_file_goes_once_its_process_is_dead_also_when_nobody_has_reaped_it(tmp_path: Path) -> None:
    file, child = tmp_path / "x.pid", subprocess.Popen(["sleep", "60"])
    file.write_text(f"{child.pid}\n")
    forget_dead(file)
    assert file.exists()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    forget_dead(file)
    assert not file.exists()
    child.wait()
    forget_dead(file)
