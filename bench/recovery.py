"""Seconds from a `kill -9` of each process to the moment it does its work again, while a run goes on.

`python -m bench.recovery [--times 5]`, with the stack up (`ratchet up`) and the tiny policy made (`ratchet bootstrap
tiny`). Starts a run of its own, kills each part in turn, prints a Markdown table and cancels the run. The last line is
JSON: `median_s` by part. A part is back when the supervisor finds its new process healthy; an engine when it carries
proven weights, which is when requests go to it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from bench.measure import finish
from workers.settings import Settings
from workers.stack.control import read_status
from workers.stack.state import Home
from workers.stack.status import PartState, PartStatus

EXAMPLE = Path(__file__).parents[1] / "examples/runs/shell.json"
QUIET_S = 3.0
"""Between a recovery and the next kill, so that each is one failure and not two."""
LIMIT_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="kills of each part")
    times = parser.parse_args().times
    settings = Settings()
    home = Home(settings.home_path)
    run = f"bench-recovery-{int(time.time())}"
    start_run(home, settings, run)
    try:
        until("the first group", lambda: status_of(settings, run).get("groups_in_flight", 0) > 0)
        rows: dict[str, list[float]] = {}
        for number in range(times):
            for part in parts(home):
                if part.pid is None:
                    print(f"{part.name}: not the stack's own, left alone", file=sys.stderr)
                    continue
                time.sleep(QUIET_S)
                seconds = recovery(home, part, run)
                rows.setdefault(part.name, []).append(seconds)
                print(f"{number + 1}/{times} {part.name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        state = status_of(settings, run)
        print(f"run {run}: {state['state']}, step {state['step']}, outcomes {state['outcomes']}", file=sys.stderr)
    finally:
        temporal(settings, "cancel", "-w", run)
    print("| part | median s | least | most |\n| --- | --- | --- | --- |")
    for name, values in rows.items():
        print(f"| `{name}` | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")
    finish({"median_s": {name: round(statistics.median(values), 1) for name, values in rows.items()}})


def recovery(home: Home, part: PartStatus, run: str) -> float:
    """Kill the part's process and wait until it works again."""
    assert part.pid is not None
    began = time.monotonic()
    os.kill(part.pid, signal.SIGKILL)

    def back() -> bool:
        now = next(item for item in parts(home) if item.name == part.name)
        healthy = now.state is PartState.HEALTHY and now.pid != part.pid
        return healthy and (not part.address.startswith("http") or part.name == "s3" or serves(part.address, run))

    until(f"{part.name} again", back)
    return time.monotonic() - began


def serves(url: str, run: str) -> bool:
    """Whether an engine carries proven weights of the run."""
    try:
        label = str(httpx.get(f"{url}/weight_info", timeout=2).json()["weight_version"])
    except (httpx.HTTPError, ValueError, KeyError):
        return False
    return label.startswith(f"{run}:") and not label.endswith("?")


def parts(home: Home) -> list[PartStatus]:
    status = read_status(home)
    assert status is not None, "the stack is not up: run `ratchet up`"
    return [part for part in status.parts if part.state is not PartState.DONE]


def start_run(home: Home, settings: Settings, run: str) -> None:
    config = json.loads(EXAMPLE.read_text()) | {"evaluation": {"tasks": 0}}
    config["training"] |= {"steps": 1000, "final_learning_rate": 1.0, "learning_rate": 1e-6}
    path = home.runs / f"{run}.json"
    path.write_text(json.dumps(config))
    started = temporal(
        settings,
        *("start", "--task-queue", "control", "--type", "TrainingRun", "--workflow-id", run),
        *("--input-file", str(path)),
    )
    assert started.returncode == 0, started.stderr


def status_of(settings: Settings, run: str) -> dict[str, object]:
    done = temporal(settings, "query", "-w", run, "--type", "status", "-o", "json")
    answer: dict[str, object] = json.loads(done.stdout)["queryResult"][0] if done.returncode == 0 else {}
    return answer


def temporal(settings: Settings, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("temporal")), "workflow", *argv]
    command += ["--address", settings.temporal_address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.1)


if __name__ == "__main__":
    main()
