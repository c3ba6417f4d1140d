"""Which rewards a Harbor verifier can write, read from its script and never run.

Owns the reading. Promises a set only where the script says each of its rewards in so many words, and nobody else of the
tests' files writes one: another number was then written by what the tests ran. Called by `tasksets.harbor`.
"""

from __future__ import annotations

import re
from pathlib import Path

_WRITES = re.compile(
    r"""(?:echo|printf)\s+(?:-n\s+)?(?P<quote>["']?)(?P<number>-?\d+(?:\.\d+)?)(?:\\n)?(?P=quote)\s*(?:>|\|\s*tee)"""
    r"""\s*["']?/logs/verifier/reward\.txt["']?(?=[\s;&|)'"]|$)"""
)
_HARMLESS = re.compile(r"""(?:cat|mkdir(?:\s+-p)?)\s+["']?/logs/verifier(?:/reward\.txt)?["']?(?=[\s;&|)]|$)""")
_NAMED = re.compile(r"reward\.(?:txt|json)")
_FOLDER = re.compile(r"/logs/verifier(?!/[\w-]+\.\w)|/logs(?!/)")
"""The folder itself: whoever is given it may write what it likes there."""
MOST_BYTES = 1 << 20


def written_rewards(tests: Path, script: str) -> list[float]:
    """Numbers of which `script`, tests/test.sh, writes one; empty where that is not known.

    Example: [0.0, 1.0] of `if pytest; then echo 1 > /logs/verifier/reward.txt; else echo 0 > ...; fi`."""
    lines = [line for line in script.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    found = sorted({float(match["number"]) for match in _WRITES.finditer(text)})
    rest = _HARMLESS.sub(" ", _WRITES.sub(" ", text))
    if _NAMED.search(rest) or _FOLDER.search(rest) or any(map(_names_one, _others(tests))):
        return []
    return found if 0.0 in found and found[-1] >= 1.0 else []


def _others(tests: Path) -> list[Path]:
    return [path for path in sorted(tests.rglob("*")) if path.is_file() and path != tests / "test.sh"]


def _names_one(path: Path) -> bool:
    """Whether it may write a reward: one that is too large to be looked at may."""
    if path.stat().st_size > MOST_BYTES:
        return path.suffix in ("", ".py", ".sh")
    text = path.read_text(errors="replace")
    return _NAMED.search(text) is not None or _FOLDER.search(text) is not None
