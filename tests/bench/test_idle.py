from __future__ import annotations

import pytest

from bench.idle import running

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
