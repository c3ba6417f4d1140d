from __future__ import annotations

import pytest
from psutil._pslinux import scputimes

from bench.idle import busy_share, running

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 5.0
"""


def test_running_requests_are_read_from_the_engines_own_metrics() -> None:
    assert running(METRICS) == 3.0


def test_a_text_without_the_figure_is_no_idle_engine() -> None:
    with pytest.raises(ValueError, match="num_requests_running"):
        running("vllm:num_requests_waiting 0.0\n")


def test_processors_that_wait_for_a_disk_are_not_busy() -> None:
    fields = dict.fromkeys(scputimes._fields, 0.0)
    before = scputimes(**fields)
    after = scputimes(**(fields | {"user": 3.0, "system": 1.0, "iowait": 2.0, "idle": 10.0}))
    assert busy_share(before, after) == 0.25
    assert busy_share(before, before) == 0.0
