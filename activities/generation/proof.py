"""When an engine has proven a version: what it must show after a load, and the record of what it showed.

Two proofs, since either misses what the other sees. The checksums of what the engine was given and of what it holds are
the manifest's: a flipped bit shows, however little it changes. And it scores the manifest's canary as the trainer did,
not as under the version before, and from no cache: an engine may keep a second copy of a matrix that the load did not
reach. Called by the engine loader.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from activities.generation.answers import Checksums
from activities.publication.checksums import added
from activities.publication.manifest import Canary, Manifest, TensorInfo
from workflows.contracts import ApplyInput, ApplyOutput, KvPlan, Message

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest mean |difference| of the log-probabilities, by the engine's dtype. Rounding alone gives 3e-7 and 5e-3."""
NOISE = {"float32": 1e-6, "bfloat16": 2e-3}
"""A change of the trainer's log-probabilities above this shows in the engine's too."""


class Shown(Message):
    """What an engine showed of one version, kept to compare the next one with."""

    digest: str
    """Of the manifest."""
    weights: str = ""
    """sha256 of its weights: an adapter may have moved by less than they show."""
    parameters: str
    """Digest of the parameters that the engine holds."""
    canary: Canary
    """The trainer's."""
    logprobs: list[float]
    """The engine's own, of the canary's tokens."""
    cached_tokens: int
    """Tokens of the canary that came from the prefix cache after the load."""

    @property
    def max_abs(self) -> float:
        return max(_differences(self.logprobs, self.canary.logprobs), default=0.0)

    @property
    def mean_abs(self) -> float:
        """Over the scored tokens: all but the first."""
        return sum(_differences(self.logprobs, self.canary.logprobs)) / max(1, len(self.logprobs) - 1)


class Desired(Message):
    """What an engine is to serve, `<home>/engines/<name>.desired.json`. `proof` is None until it was proven."""

    message: ApplyInput
    proof: ApplyOutput | None = None
    last: Shown | None = None
    """What the engine showed of the last version that it has proven."""
    asleep: bool = False
    """It may have given its device up, and nothing has woken it since."""
    resting: bool = False
    """So it should stay for now: the trainer has the device."""

    @staticmethod
    def path(home: Path, engine: str) -> Path:
        return home / "engines" / f"{engine}.desired.json"

    @classmethod
    def read(cls, home: Path, engine: str) -> Desired | None:
        path = cls.path(home, engine)
        return cls.model_validate_json(path.read_text()) if path.is_file() else None

    def write(self, home: Path) -> None:
        write_whole(self.path(home, self.message.engine.name), self.model_dump_json())


def judge(manifest: Manifest, shown: Shown, last: Shown | None, dtype: str, kv: KvPlan = KvPlan.DROP) -> str:
    """Why the engine has not proven the manifest's version; empty when it has. `dtype` is the engine's."""
    if shown.cached_tokens and kv is not KvPlan.KEEP:
        return f"{shown.cached_tokens} prompt tokens came from the cache of earlier weights"
    if not shown.mean_abs <= TOLERANCE[dtype]:
        return (
            f"the canary differs from the trainer's by {shown.mean_abs:.2g} nats in the mean, {shown.max_abs:.2g} at "
            f"most; {TOLERANCE[dtype]:.0e} is allowed in {dtype}"
        )
    if last is None:
        return ""
    if last.digest == manifest.digest or last.weights == manifest.weights_file.sha256:
        return "" if last.parameters == shown.parameters else "the same weights gave other parameters than before"
    if last.canary.token_ids == shown.canary.token_ids and last.logprobs == shown.logprobs:
        moved = max(_differences(last.canary.logprobs, shown.canary.logprobs), default=0.0)
        if moved > NOISE[dtype]:
            return "the canary is what it was under the version before"
        if last.parameters == shown.parameters:
            return "the parameters are those of the version before"
    return ""


def compared(tensors: Iterable[TensorInfo], told: Checksums) -> tuple[int, str]:
    """(how many of the manifest's tensors the engine was given as they were published, what differs; empty where
    nothing does). Manifests of before checksums have none to compare with."""
    expected = {item.name: item.checksum for item in tensors if item.checksum}
    faults = [
        f"{name} as the engine was given it" if name in told.given else f"{name}, which the engine was not given"
        for name, checksum in expected.items()
        if told.given.get(name) != checksum
    ]
    faults += [
        f"{' + '.join(names)} as the engine holds it"
        for found, names in told.held
        if expected.keys() >= set(names) and added(expected[name] for name in names) != found
    ]
    same = len(expected) - sum(told.given.get(name) != checksum for name, checksum in expected.items())
    more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
    return same, f"the manifest has other checksums: {'; '.join(faults[:3])}{more}" if faults else ""


def write_whole(path: Path, text: str) -> None:
    """Write a small file that readers see whole or not at all."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    partial.replace(path)


def _differences(one: list[float], other: list[float]) -> list[float]:
    return [abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)]
