"""A part for a fork server: `MODE FOLDER`. Each import and each process leaves a line in the folder."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path


def preload(arguments: Sequence[str]) -> None:
    mode, folder = arguments
    _note(Path(folder, "preloads"), str(os.getpid()))
    if mode == "broken":
        raise ImportError("no such library")
    if mode == "slow":
        time.sleep(600)
    if mode == "threaded":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def main() -> None:
    mode, folder = sys.argv[1:]
    _note(Path(folder, "mains"), f"{os.getpid()} {os.getsid(0)} {random.random()} {len(sys.stdin.read())}")
    if mode == "exit":
        raise SystemExit(3)
    if mode == "raise":
        raise ValueError("it was broken")
    time.sleep(600)


def _note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")
