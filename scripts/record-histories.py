#!/usr/bin/env python
"""Record the histories that tests/replay replays: `python scripts/record-histories.py [--keep NAME]`.

Plays every workflow on a real local Temporal server with scripted activities, in less than a minute, and writes
tests/replay/histories/current/*.json. `--keep NAME` first copies the present ones to tests/replay/histories/NAME, where
they stay: for a change that `workflow.patched` guards, so that executions begun before it go on being tested.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.replay.recording import record  # noqa: E402
from tests.workflows.conftest import local_server  # noqa: E402

HISTORIES = ROOT / "tests" / "replay" / "histories"
CURRENT = HISTORIES / "current"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="NAME", help="keep the present histories as histories/NAME")
    keep = parser.parse_args().keep
    # The scenes are full of failures that are meant.
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as fresh:
        async with local_server(identity="recorder") as client:
            written = await record(client, Path(fresh))
        if keep:
            shutil.copytree(CURRENT, HISTORIES / keep)
        shutil.rmtree(CURRENT, ignore_errors=True)
        shutil.copytree(fresh, CURRENT)
    size = sum(path.stat().st_size for path in CURRENT.iterdir())
    print(f"{len(written)} histories, {size / 1024:.0f} KiB, {time.monotonic() - began:.0f} s: {CURRENT}")


if __name__ == "__main__":
    asyncio.run(main())
