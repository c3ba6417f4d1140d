"""The native taskset `shell`: eight kinds of small jobs in a Linux shell, made from the task's id.

Owns the kinds and their parameters. Promises: the same id gives the same task everywhere; no two tasks of different
splits share their parameters; every task takes a look or a change that no constant answer replaces; every task comes
with commands that solve it. Opened through `tasksets.open_taskset("shell")`.

An id is `<kind>-<number>`. Numbers below TRAIN_PER_KIND are the training split, the next HELD_OUT_PER_KIND the
held-out one. The first two words of a task decide its split (`_is_held_out`): a held-out pair never occurs in training.

The agent works in /work and may change it; /data is for reading. Setup and check are plain busybox shell.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tasksets.base import Task
from workflows.contracts import Split
from workflows.errors import InvalidConfig

TRAIN_PER_KIND = 100
HELD_OUT_PER_KIND = 25

_WORD_LIST = (
    "acorn amber anchor apple arrow aspen badge banjo barley basil beacon beaver birch bishop bottle bridge bronze "
    "butter cabin cactus camel candle canyon carbon castle cedar cherry clover cobalt comet copper coral cotton crane "
    "dagger daisy delta desert dolphin dragon eagle echidna ember falcon fern fiddle flint forest fossil garnet "
    "ginger glacier granite harbor hazel helmet heron indigo island ivory jacket jasmine jasper juniper kayak kettle "
    "lagoon lantern laurel lemon lily linen lotus magnet mango maple marble meadow melon mirror nectar nickel oasis "
    "olive onyx orchid otter oyster pebble pepper pigeon plum pollen poplar quartz raven ribbon river"
)
WORDS = _WORD_LIST.split()
MISSPELLINGS = ("ecko", "eco", "ehco", "ecoh", "exho", "echa")


class ShellTaskset:
    """See the module's docstring."""

    name = "shell"

    def ids(self, split: Split) -> list[str]:
        """All ids of a split, kind by kind."""
        numbers = (
            range(TRAIN_PER_KIND) if split is Split.TRAIN else range(TRAIN_PER_KIND, TRAIN_PER_KIND + HELD_OUT_PER_KIND)
        )
        return [f"{kind}-{number:04d}" for kind in KINDS for number in numbers]

    def load(self, task_id: str) -> Task:
        """The task. Raises InvalidConfig for an id that is not `<kind>-<number>` with a number in range."""
        kind, _, digits = task_id.rpartition("-")
        known = kind in KINDS and len(digits) == 4 and digits.isdecimal()
        if not known or int(digits) >= TRAIN_PER_KIND + HELD_OUT_PER_KIND:
            raise InvalidConfig(f"the taskset shell has no task {task_id!r}; its kinds are {', '.join(KINDS)}")
        draw = _Draw(random.Random(f"shell/{task_id}"), held_out=int(digits) >= TRAIN_PER_KIND)
        return KINDS[kind](task_id, draw)


def draw_task(kind: str, rng: random.Random) -> Task:
    """A task with parameters of the training split, as many as anyone wants: what the warm start practises on."""
    return KINDS[kind](f"{kind}-drawn", _Draw(rng, held_out=False))


class _Draw:
    """Parameters of one task. `words` never repeats a word within the task."""

    def __init__(self, rng: random.Random, *, held_out: bool) -> None:
        self.rng = rng
        pair = rng.sample(WORDS, 2)
        while _is_held_out(*pair) != held_out:
            pair = rng.sample(WORDS, 2)
        self._used = set(pair)
        self.pair = (pair[0], pair[1])

    def words(self, count: int) -> list[str]:
        drawn = self.rng.sample([word for word in WORDS if word not in self._used], count)
        self._used.update(drawn)
        return drawn

    def word(self) -> str:
        return self.words(1)[0]


def _is_held_out(first: str, second: str) -> bool:
    return (WORDS.index(first) + 2 * WORDS.index(second)) % 5 == 0


def _put(path: str, lines: list[str]) -> str:
    """Shell that writes `lines`; files under /work become writable for the agent."""
    text = "".join(f"{line}\\n" for line in lines)
    folder = path.rsplit("/", 1)[0]
    mode = "a+rw" if path.startswith("/work/") else "a+r"
    return f"mkdir -p {folder} && printf '{text}' > {path} && chmod {mode} {path} || exit 1\n"


def _answer_is(answer: str) -> str:
    return f'[ "$ANSWER" = "{answer}" ] || exit 1\n'


def _holds(path: str, lines: list[str]) -> str:
    """Shell that fails with 1 unless `path` is an ordinary file with exactly these lines."""
    text = "\n".join(lines)
    return f'[ -f {path} ] && [ ! -L {path} ] && [ "$(cat {path})" = "{text}" ] || exit 1\n'


def _find(task_id: str, draw: _Draw) -> Task:
    """Look a key up in a file of pairs."""
    file, key = draw.pair
    keys, values = [key, *draw.words(4)], draw.words(5)
    lines = [f"{k} {v}" for k, v in zip(keys, values, strict=True)]
    draw.rng.shuffle(lines)
    return Task(
        id=task_id,
        kind="find",
        instruction=f"What is the value of {key} in /data/{file}?",
        setup=_put(f"/data/{file}", lines),
        check=_answer_is(values[0]),
        oracle=[f"grep {key} /data/{file}"],
        oracle_answer=values[0],
        oracle_observations=[f"{key} {values[0]}"],
    )


def _count(task_id: str, draw: _Draw) -> Task:
    """Count the lines that say a word."""
    file, word = draw.pair
    number = draw.rng.randrange(10, 60)
    lines = [word] * number + draw.words(5) * draw.rng.randrange(2, 9)
    draw.rng.shuffle(lines)
    return Task(
        id=task_id,
        kind="count",
        instruction=f"How many lines of /data/{file} say {word}?",
        setup=_put(f"/data/{file}", lines),
        check=_answer_is(str(number)),
        oracle=[f"grep -c {word} /data/{file}"],
        oracle_answer=str(number),
        oracle_observations=[str(number)],
    )


def _top(task_id: str, draw: _Draw) -> Task:
    """Find the name with the largest number."""
    names = [draw.pair[1], *draw.words(5)]
    draw.rng.shuffle(names)
    numbers = sorted(draw.rng.sample(range(10, 100), len(names)))
    lines = [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]
    draw.rng.shuffle(lines)
    file = draw.pair[0]
    return Task(
        id=task_id,
        kind="top",
        instruction=f"Which name has the largest number in /data/{file}?",
        setup=_put(f"/data/{file}", lines),
        check=_answer_is(names[-1]),
        oracle=[f"sort -n /data/{file} | tail -n 1"],
        oracle_answer=names[-1],
        oracle_observations=[f"{numbers[-1]} {names[-1]}"],
    )


def _chain(task_id: str, draw: _Draw) -> Task:
    """Follow one file to the next."""
    first, second = draw.pair
    word, *others = draw.words(4)
    setup = _put(f"/data/{first}", [second]) + _put(f"/data/{second}", [word])
    return Task(
        id=task_id,
        kind="chain",
        instruction=f"The file /data/{first} names another file in /data. What word is in that one?",
        setup=setup + "".join(_put(f"/data/{other}", [other]) for other in others),
        check=_answer_is(word),
        oracle=[f"cat /data/{first}", f"cat /data/{second}"],
        oracle_answer=word,
        oracle_observations=[second, word],
    )


def _edit(task_id: str, draw: _Draw) -> Task:
    """Replace a word in a file."""
    old, new = draw.pair
    file, *others = draw.words(4)
    lines = [old, *others]
    draw.rng.shuffle(lines)
    return Task(
        id=task_id,
        kind="edit",
        instruction=f"Replace {old} by {new} in the file {file}.",
        setup=_put(f"/work/{file}", lines),
        check=_holds(f"/work/{file}", [new if line == old else line for line in lines]),
        oracle=[f"sed -i s/{old}/{new}/ {file}"],
        oracle_answer="done",
        oracle_observations=["(no output)"],
    )


def _move(task_id: str, draw: _Draw) -> Task:
    """Rename a file."""
    old, new = draw.pair
    word = draw.word()
    return Task(
        id=task_id,
        kind="move",
        instruction=f"Rename the file {old} to {new}.",
        setup=_put(f"/work/{old}", [word]),
        check=f"[ ! -e /work/{old} ] || exit 1\n" + _holds(f"/work/{new}", [word]),
        oracle=[f"mv {old} {new}"],
        oracle_answer="done",
        oracle_observations=["(no output)"],
    )


def _report(task_id: str, draw: _Draw) -> Task:
    """Read a word and write it to a new file."""
    source, target = draw.pair
    word = draw.word()
    return Task(
        id=task_id,
        kind="report",
        instruction=f"Write the word from /data/{source} to a new file {target}.",
        setup=_put(f"/data/{source}", [word]) + "mkdir -p /work || exit 1\n",
        check=_holds(f"/work/{target}", [word]),
        oracle=[f"cat /data/{source}", f"echo {word} > {target}"],
        oracle_answer="done",
        oracle_observations=[word, "(no output)"],
    )


def _fix(task_id: str, draw: _Draw) -> Task:
    """Repair a script whose command is misspelt."""
    file, word = draw.pair
    wrong = draw.rng.choice(MISSPELLINGS)
    return Task(
        id=task_id,
        kind="fix",
        instruction=f"The script {file} should echo {word} but fails. Correct it.",
        setup=_put(f"/work/{file}", [f"{wrong} {word}"]),
        check=_holds(f"/work/{file}", [f"echo {word}"]),
        oracle=[f"sh {file}", f"sed -i s/{wrong}/echo/ {file}"],
        oracle_answer="done",
        oracle_observations=[f"{file}: line 1: {wrong}: not found\n(exit 127)", "(no output)"],
    )


KINDS: dict[str, Callable[[str, _Draw], Task]] = {
    "find": _find,
    "count": _count,
    "top": _top,
    "chain": _chain,
    "edit": _edit,
    "move": _move,
    "report": _report,
    "fix": _fix,
}
