from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.generation.placement import BALANCE, PATIENCE_S, QUIET, Load, bound, order, place, return_to

ENGINES = ["local-e0", "local-e1", "local-e2", "local-e3"]
loads = st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=1, max_size=8).map(
    lambda rows: [Load(f"e{index}", requests, room) for index, (requests, room) in enumerate(rows)]
)


def idle(*engines: str, requests: int = 0) -> list[Load]:
    return [Load(engine, requests, True) for engine in engines or ENGINES]


def test_prefixes_spread_over_the_engines() -> None:
    homes = Counter(place(f"shell/train/count-{number}", idle()) for number in range(400))
    assert min(homes[engine] for engine in ENGINES) > 60


def test_only_the_prefixes_of_a_lost_engine_move() -> None:
    for number in range(100):
        before = place(f"p{number}", idle())
        after = place(f"p{number}", idle(*ENGINES[1:]))
        assert before in (after, ENGINES[0])


def test_siblings_that_come_at_once_start_on_one_engine() -> None:
    requests = Counter[str]()
    for _ in range(QUIET):
        engine = place("p", [Load(name, requests[name], True) for name in ENGINES])
        assert engine is not None
        requests[engine] += 1
    assert len(requests) == 1


def test_overflow_of_a_prefix_goes_to_the_next_engine_of_its_order() -> None:
    first, second, *rest = order("p", ENGINES)
    full = [Load(first, 40, True), *idle(second, *rest, requests=10)]
    assert place("p", full) == second


def test_many_groups_of_one_prompt_load_all_engines_within_the_bound() -> None:
    requests = Counter[str]()
    for sent in range(200):
        engine = place("p", [Load(name, requests[name], True) for name in ENGINES])
        assert engine is not None
        requests[engine] += 1
        assert max(requests.values()) <= max(QUIET, BALANCE * (sent + 1) / len(ENGINES) + 1)


@given(loads, st.text(max_size=5))
def test_nobody_gets_more_than_the_bound_unless_all_below_it_are_without_room(loads: list[Load], prefix: str) -> None:
    engine = place(prefix, loads)
    if engine is None:
        assert not any(load.room for load in loads)
        return
    taken = next(load for load in loads if load.engine == engine)
    assert taken.room
    if taken.requests + 1 > bound(loads):
        assert all(not load.room or load.requests >= taken.requests for load in loads)


@given(loads, st.text(max_size=5))
def test_somebody_is_always_below_the_bound(loads: list[Load], prefix: str) -> None:
    assert min(load.requests for load in loads) + 1 <= bound(loads)


@given(loads)
def test_a_turn_returns_to_its_cache_however_loaded_while_there_is_room(loads: list[Load]) -> None:
    home = loads[0]
    went = return_to(home.engine, "p", loads, waited_s=0)
    assert went == (home.engine if home.room else None)


def test_a_turn_leaves_a_full_home_only_when_its_patience_is_spent() -> None:
    loads = [Load("home", 50, False), Load("other", 3, True)]
    assert return_to("home", "p", loads, waited_s=PATIENCE_S - 0.1) is None
    assert return_to("home", "p", loads, waited_s=PATIENCE_S) == "other"
    assert return_to("home", "p", [Load("home", 50, False), Load("other", 3, False)], waited_s=60) is None


@pytest.mark.parametrize("prefix", ["shell/train/count-1", "shell/train/count-12"])
def test_the_order_of_a_prefix_does_not_depend_on_how_the_engines_are_listed(prefix: str) -> None:
    assert order(prefix, ENGINES) == order(prefix, ENGINES[::-1])
