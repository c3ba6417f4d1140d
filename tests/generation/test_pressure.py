from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.generation.pressure import FALL, FIRST, HIGH_KV_USAGE, LEAST, MOST, RISE, Pressure, next_limit

CALM = Pressure(kv_usage=0.2, preemptions=0, waiting=0, running=5)
pressures = st.builds(
    Pressure,
    kv_usage=st.floats(0, 1),
    preemptions=st.integers(0, 5),
    waiting=st.integers(0, 3),
    running=st.integers(0, 50),
)
limits, counts = st.integers(LEAST, MOST), st.integers(0, MOST)


def after(limit: int, now: Pressure, *, in_flight: int, used_up: bool = True, before: Pressure | None = CALM) -> int:
    return next_limit(limit, most=MOST, in_flight=in_flight, used_up=used_up, before=before, now=now)


@given(limits, counts, st.booleans(), st.none() | pressures, pressures)
def test_a_limit_stays_within_its_bounds_and_moves_by_one_step(
    limit: int, in_flight: int, used_up: bool, before: Pressure | None, now: Pressure
) -> None:
    new = after(limit, now, in_flight=in_flight, used_up=used_up, before=before)
    assert LEAST <= new <= MOST
    assert new <= limit + RISE
    assert new >= min(limit, max(LEAST, int(FALL * in_flight)))


@given(limits, counts, st.booleans(), st.none() | pressures, pressures)
def test_pressure_never_raises_and_its_absence_never_lowers(
    limit: int, in_flight: int, used_up: bool, before: Pressure | None, now: Pressure
) -> None:
    new = after(limit, now, in_flight=in_flight, used_up=used_up, before=before)
    preempted = before is not None and now.preemptions > before.preemptions
    if preempted or now.kv_usage > HIGH_KV_USAGE:
        assert new <= limit
    else:
        assert new >= limit


@given(limits, counts)
def test_room_that_nobody_used_brings_no_more(limit: int, in_flight: int) -> None:
    assert after(limit, CALM, in_flight=in_flight, used_up=False) == limit


def test_requests_that_wait_in_the_engine_keep_the_limit_from_rising() -> None:
    assert after(20, CALM._replace(waiting=3), in_flight=20) == 20
    assert after(20, CALM, in_flight=20) == 20 + RISE


@pytest.mark.parametrize("now", [CALM._replace(preemptions=1), CALM._replace(kv_usage=0.95)])
def test_pressure_takes_from_what_is_in_flight_and_only_once(now: Pressure) -> None:
    assert after(60, now, in_flight=20) == 14
    # The twenty still run: nothing of the shortage is new.
    assert after(14, now, in_flight=20) == 14
    assert after(14, now, in_flight=10) == 7


def test_a_counter_that_began_anew_is_no_preemption() -> None:
    assert after(20, CALM, in_flight=20, before=CALM._replace(preemptions=90)) == 20 + RISE
    assert after(20, CALM._replace(preemptions=90), in_flight=20, before=None) == 20 + RISE


def test_one_request_is_always_allowed() -> None:
    limit = 1
    for _ in range(5):
        limit = after(limit, CALM._replace(kv_usage=1.0), in_flight=1)
    assert limit == 1


def settled(capacity: int, limits: list[int], rounds: int) -> list[list[int]]:
    """The limits of workers that always have more to send, over an engine whose cache holds `capacity` requests."""
    history, before, preemptions = [], CALM, 0
    for _ in range(rounds):
        running = sum(limits)
        preemptions += running > capacity
        now = Pressure(min(1.0, running / capacity), preemptions, 0, running)
        limits = [after(limit, now, in_flight=limit, before=before) for limit in limits]
        before = now
        history.append(limits)
    return history


@pytest.mark.parametrize("capacity", [5, 40, 110])
def test_the_limit_settles_where_the_engine_is_busy_and_nobody_is_preempted_for_long(capacity: int) -> None:
    late = [limits[0] for limits in settled(capacity, [FIRST], 200)[50:]]
    assert max(late) <= capacity + RISE
    assert sum(late) / len(late) >= 0.6 * capacity


def test_an_engine_with_more_room_gets_more_again() -> None:
    low = settled(10, [FIRST], 50)[-1]
    assert max(limits[0] for limits in settled(100, low, 100)) > 80


def test_workers_that_share_an_engine_come_to_fair_shares() -> None:
    late = settled(60, [60, 1], 300)[200:]
    one, other = (sum(limits[index] for limits in late) for index in (0, 1))
    assert max(one, other) < 1.3 * min(one, other)


PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:num_preemptions_total{engine="0",model_name="policy"} 7.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.79e+09
"""


def test_an_engines_page_of_metrics_is_read() -> None:
    assert Pressure.parse(PAGE) == Pressure(0.25, 7, 2, 3)


def test_the_cores_of_one_server_count_together() -> None:
    assert Pressure.parse(PAGE + PAGE.replace('"0"', '"1"').replace("0.25", "0.75")) == Pressure(0.75, 14, 4, 6)
    assert Pressure.together([Pressure(0.25, 7, 2, 3), Pressure(0.5, 1, 1, 1)]) == Pressure(0.5, 8, 3, 4)


def test_a_page_without_a_figure_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no vllm:kv_cache_usage_perc among"):
        Pressure.parse(PAGE.replace("kv_cache_usage_perc", "gpu_cache_usage"))
