"""What a verifier's run says an answer is worth.

Pure rules. A reward is read where the format has it, and then believed as far as the signed report and the verifier's
script bear it out: an answer is right only if every expected test was reported, and reported well, and a number that
the script never writes was written by somebody else. A claim that they contradict is tampering; a run without a reward
is a broken verifier, and never a silent zero. Called by `Examiner`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from activities.sandbox.channel import Result
from activities.sandbox.machines.report import Reported
from tasksets.base import Reads

FULL = 1.0
SUMMARY = "short test summary info"
_LINE = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_GOOD = ("PASSED", "SKIPPED", "XFAIL")
_COLOURS = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
NAMED = 3
CUT_OFF = "a session of its tests began and did not end"


@dataclass(frozen=True)
class Found:
    """`reward` None: the verifier gave none, `words` say how."""

    reward: float | None
    words: str
    tampered: bool = False


def find_reward(
    reads: Reads,
    result: Result,
    files: dict[str, bytes],
    reported: Reported,
    expected: list[str],
    rewards: Sequence[float] = (),
) -> Found:
    """`files` are those of the verifier's logs, by name; `rewards` what its script can write, empty for anything."""
    claimed = _of_files(files) if reads is Reads.REWARD_FILE else _of_summary(result)
    if claimed.reward is None:
        return claimed
    if rewards and claimed.reward not in rewards:
        return Found(0.0, f"{claimed.words}, which its script never writes", tampered=True)
    missing, failed = reported.missing(expected), reported.failed(expected)
    if claimed.reward >= FULL and missing:
        return Found(0.0, f"not reported: {_some(missing)}, though {claimed.words}", tampered=True)
    if claimed.reward >= FULL and failed:
        return Found(0.0, f"failed: {_some(failed)}, though {claimed.words}", tampered=True)
    if claimed.reward >= FULL and not reported.ended:
        return Found(0.0, f"{CUT_OFF}, though {claimed.words}", tampered=True)
    if claimed.reward > 0 and (missing or not reported.ended):
        why = f"not reported: {_some(missing)}" if missing else CUT_OFF
        return Found(0.0, f"{why}; {claimed.words} counts for nothing")
    return Found(claimed.reward, "; ".join(filter(None, [claimed.words, f"failed: {_some(failed)}" if failed else ""])))


def _of_files(files: dict[str, bytes]) -> Found:
    """reward.json goes before reward.txt."""
    if data := files.get("reward.json"):
        return _of_json(data)
    if data := files.get("reward.txt"):
        return _number(data.decode(errors="replace").strip(), "reward.txt")
    return Found(None, "no reward was written")


def _of_json(data: bytes) -> Found:
    try:
        rewards = json.loads(data)
    except (ValueError, RecursionError):
        return Found(None, "reward.json is no JSON")
    if not isinstance(rewards, dict) or not rewards:
        return Found(None, "reward.json holds no rewards")
    if "reward" not in rewards and len(rewards) > 1:
        return Found(None, f"reward.json holds {len(rewards)} rewards, and none is called reward")
    return _number(rewards.get("reward", next(iter(rewards.values()))), "reward.json")


def _number(value: object, where: str) -> Found:
    if not isinstance(value, str | int | float):
        return Found(None, f"{where} holds no number: {type(value).__name__}")
    try:
        reward = float(value)
    except (ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        return Found(None, f"{where} holds no number: {str(value)[:40]!r}")
    return Found(reward, f"{where} says {reward:g}")


def _of_summary(result: Result) -> Found:
    """Of the last summary that pytest printed: each line must be well. Read line by line: the code under test prints
    here too, and a pattern that goes over lines could take hours."""
    text = _COLOURS.sub("", (result.head + result.tail).decode(errors="replace")).replace("\r", "")
    lines = text.split("\n")
    headings = [number for number, line in enumerate(lines) if line.strip("= \t") == SUMMARY]
    matches = [_LINE.match(line) for line in lines[headings[-1] :]] if headings else []
    words = [match[1] for match in matches if match]
    if not words:
        return Found(None, "its output has no summary of tests")
    bad = sum(word not in _GOOD for word in words)
    return Found(0.0 if bad else FULL, f"the summary says {len(words) - bad} of {len(words)} tests are well")


def _some(tests: list[str]) -> str:
    more = len(tests) - NAMED
    return ", ".join(tests[:NAMED]) + (f" and {more} more" if more > 0 else "")
