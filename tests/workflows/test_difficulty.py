"""Which pool a task is in, and which task comes next: the rules without a server."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflows.admission import MOST_DRAWN
from workflows.config import SamplingConfig, parse_run_config
from workflows.contracts import MOST_CHANGED, Draw, DrawTasksOutput, OpenRunOutput, TaskChange, TaskRequest
from workflows.converter import MAX_PAYLOAD_BYTES
from workflows.difficulty import Difficulty, Known, Sampler, Tally, difficulty_of, windowed
from workflows.run_state import Carry

RULES = SamplingConfig(by="difficulty")
EXAMPLES = settings(max_examples=40)
OFF = 5
"""Draws by which a pool may be off its share, however many there were: the bound of an interval that multiples of the
golden ratio fill grows with the logarithm of their number, and is 3.4 after 4,000."""

TALLIES = {
    Difficulty.UNSEEN: Tally(),
    Difficulty.UNSOLVABLE: Tally(0, 16),
    Difficulty.HARD: Tally(1, 10),
    Difficulty.LEARNING: Tally(4, 8),
    Difficulty.SATURATED: Tally(8, 8),
}
SIZES = st.fixed_dictionaries({name: st.integers(0, 30) for name in Difficulty}).filter(
    lambda sizes: any(sizes.values())
)


def known_of(sizes: dict[Difficulty, int]) -> dict[str, Known]:
    """So many tasks of each pool, drawn in an order of no pattern."""
    names = [f"{name}-{index}" for name in Difficulty for index in range(sizes.get(name, 0))]
    places = random.Random(3).sample(range(len(names)), len(names))
    pools = [Difficulty(name.partition("-")[0]) for name in names]
    return {name: Known(TALLIES[pool], at) for name, pool, at in zip(names, pools, places, strict=True)}


def draws(sampler: Sampler, numbers: range) -> list[tuple[str, Difficulty]]:
    found = [sampler.draw(number) for number in numbers]
    return [item for item in found if item is not None]


@pytest.mark.parametrize(
    ("passes", "episodes", "difficulty"),
    [
        (0, 0, "unseen"),
        (0, 1, "learning"),
        (1, 1, "learning"),
        (0, 8, "hard"),
        (0, 14, "hard"),
        (0, 15, "unsolvable"),
        (2, 10, "learning"),
        (1, 10, "hard"),
        (7, 7, "learning"),
        (8, 8, "saturated"),
        (28, 32, "learning"),
        (30, 32, "saturated"),
    ],
)
def test_a_pool_follows_from_the_pass_rate_with_its_prior(passes: int, episodes: int, difficulty: str) -> None:
    assert difficulty_of(Tally(passes, episodes), RULES) == difficulty
    assert Tally(passes, episodes).pass_rate == (passes + 1) / (episodes + 2)


def test_what_older_policies_did_fades_as_newer_groups_come() -> None:
    failed, solved = Tally(0, 8), Tally(8, 8)
    pools = [difficulty_of(windowed([solved] * count + [failed] * 4, 32), RULES) for count in range(5)]
    assert pools == ["unsolvable", "learning", "learning", "learning", "saturated"]
    assert windowed([Tally(1, 5), Tally(0, 5), Tally(9, 9)], 8) == Tally(1, 10), "groups count as wholes"


@EXAMPLES
@given(SIZES, st.integers(0, 2**31 - 1), st.integers(0, 5000))
def test_pools_get_the_shares_that_their_weights_declare_over_few_draws_and_over_many(
    sizes: dict[Difficulty, int], seed: int, first: int
) -> None:
    sampler = Sampler(RULES, seed, fresh=[], known=known_of(sizes))
    weights = {name: RULES.weight_of(name) * sizes[name] for name in Difficulty}
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    assert sampler.shares == pytest.approx(shares) and sampler.tasks == sizes
    counts: Counter[str] = Counter()
    for done, (_, difficulty) in enumerate(draws(sampler, range(first, first + 600)), start=1):
        counts[difficulty] += 1
        assert all(abs(counts[name] - share * done) <= OFF for name, share in shares.items())


@EXAMPLES
@given(SIZES, st.integers(0, 2**31 - 1))
def test_within_a_pool_no_task_comes_again_before_all_others_and_none_is_left_out(
    sizes: dict[Difficulty, int], seed: int
) -> None:
    drawn = draws(Sampler(RULES, seed, fresh=[], known=known_of(sizes)), range(3000))
    for name in Difficulty:
        tasks = [task for task, difficulty in drawn if difficulty is name]
        for start in range(0, len(tasks), max(1, sizes[name])):
            part = tasks[start : start + sizes[name]]
            assert len(set(part)) == len(part)
        if tasks:
            assert tasks[: sizes[name]] == sorted(set(tasks), key=lambda task: known_of(sizes)[task].last)[: len(tasks)]


@EXAMPLES
@given(SIZES, st.integers(0, 2**31 - 1), st.randoms(use_true_random=False), st.sampled_from(["order", "difficulty"]))
def test_the_order_in_which_rows_come_changes_nothing(
    sizes: dict[Difficulty, int], seed: int, dice: Any, by: str
) -> None:
    rules, known = RULES.model_copy(update={"by": by}), known_of(sizes)
    shuffled = dict(dice.sample(list(known.items()), len(known)))
    fresh = ["new-1", "new-0"]
    expected = draws(Sampler(rules, seed, fresh=fresh, known=known), range(200))
    assert draws(Sampler(rules, seed, fresh=fresh, known=shuffled), range(200)) == expected


@EXAMPLES
@given(SIZES, st.integers(0, 12), st.lists(st.integers(1, 40), max_size=8), st.sampled_from(["order", "difficulty"]))
def test_a_sampler_made_anew_from_what_is_known_goes_on_without_skipping_or_repeating(
    sizes: dict[Difficulty, int], fresh: int, pages: list[int], by: str
) -> None:
    """As after a crash or a continue-as-new, at any place."""
    rules, known, new = RULES.model_copy(update={"by": by}), known_of(sizes), [f"new-{index}" for index in range(fresh)]
    first = len(known)
    whole = draws(Sampler(rules, 5, fresh=new, known=known), range(first, first + sum(pages)))
    parts, at = [], first
    for page in pages:
        sampler = Sampler(rules, 5, fresh=[task for task in new if task not in known], known=known)
        part = draws(sampler, range(at, at + page))
        for number, (task, _) in enumerate(part, start=at):
            known = known | {task: Known(known[task].tally if task in known else Tally(), number)}
        parts, at = parts + part, at + page
    assert parts == whole


def test_unseen_tasks_come_in_the_runs_order_before_those_drawn_without_an_episode() -> None:
    known = {"lost": Known(Tally(), 4)}
    drawn = draws(Sampler(RULES, 0, fresh=["b", "a", "c"], known=known), range(5, 10))
    assert [task for task, _ in drawn] == ["b", "a", "c", "lost", "b"]


def test_by_order_every_task_comes_once_per_cycle_whatever_its_difficulty() -> None:
    rules, known = SamplingConfig(), known_of(dict.fromkeys(Difficulty, 3))
    drawn = [task for task, _ in draws(Sampler(rules, 1, fresh=["new"], known=known), range(32))]
    assert drawn[:16] == drawn[16:] == ["new", *sorted(known, key=lambda task: known[task].last)]


def test_no_task_no_draw() -> None:
    assert Sampler(RULES, 0, fresh=[], known={}).draw(0) is None


def test_what_a_run_knows_of_its_tasks_stays_small_however_many_there_are() -> None:
    opened = OpenRunOutput(model="m", train_tasks=100_000, held_out_tasks=1, engines=[])
    config = parse_run_config({"model": "m", "sampling": {"by": "difficulty"}})
    empty = Carry(config=config, opened=opened)
    full = empty.model_copy(deep=True)
    full.tasks_by_difficulty = dict.fromkeys(Difficulty, 100_000)
    for _ in range(50):
        full.task_changes.note(TaskChange.ADDED, [f"{index:0200d}" for index in range(MOST_CHANGED)])
    assert full.task_changes.added == 50 * MOST_CHANGED
    assert len(full.model_dump_json()) - len(empty.model_dump_json()) < 6_000


def test_the_largest_page_of_draws_and_the_largest_request_fit_a_message() -> None:
    draw = Draw(123456, "t" * 80, "/a/folder/that/is/deep/" * 6, "unsolvable", False)
    page = DrawTasksOutput(draws=[draw] * MOST_DRAWN, taskset="shell", tasks={})
    assert len(page.model_dump_json()) < MAX_PAYLOAD_BYTES
    request = TaskRequest(tasks=["t" * 200] * MOST_CHANGED, taskset="t" * 1000, why="w" * 500)
    assert len(request.model_dump_json()) < MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    ("sampling", "fault"),
    [
        ({"by": "luck"}, "sampling.by"),
        ({"saturated_weight": 0}, "sampling.saturated_weight: Input should be greater than 0"),
        ({"hard_below": 0.95}, "sampling: unsolvable_below must be below hard_below, and that below saturated_from"),
        ({"window": 8, "saturated_from": 0.95}, "window 8 is too short.*0.100 to 0.900"),
        ({"window": 4}, "window 4 is too short"),
        ({"weights": {}}, "sampling.weights: unknown field; allowed here: by, hard_below"),
    ],
)
def test_a_mistake_in_the_sampling_is_named(sampling: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_run_config({"model": "m", "sampling": sampling})
