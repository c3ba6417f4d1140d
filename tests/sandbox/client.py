"""A worker to be killed: `python -m tests.sandbox.client BOX OP COMMAND` runs one command in a sandbox."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from activities.sandbox.channel import Operation, SocketChannel

if __name__ == "__main__":
    box, op_id, command = sys.argv[1:]
    print("calling", flush=True)
    asyncio.run(SocketChannel(Path(box)).run(Operation(op_id=op_id, command=command, timeout_s=20)))
