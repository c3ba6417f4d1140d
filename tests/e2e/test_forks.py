"""The real parts of a real stack are copied from processes that have their imports behind them."""

from __future__ import annotations

import os

import psutil
import pytest

from activities.generation.server import device, kernel_threads
from tests.stack import Stack
from workers.stack.forking import MODULE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_what_the_parts_import_starts_no_thread(stack: Stack) -> None:
    """With one, no process would be copied, and every restart would import again."""
    names = ["control", "rollout", "trainer", "engines"]
    if device() == "cpu" and kernel_threads(len(os.sched_getaffinity(0))) == 1:
        names.append("local-e0")
    for name in names:
        server = psutil.Process(stack.pid(name)).parent()
        assert server is not None and MODULE in server.cmdline(), f"{name} was not copied"
        assert server.num_threads() == 1, f"{name} can not be copied again"
