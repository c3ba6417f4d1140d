"""What a report holds of weight updates: see storage/report/model.py."""

from __future__ import annotations

from storage.report.parts import Part


class LoadPart(Part):
    """One engine's load of a version. `pause_s`: how long it made no token."""

    engine: str
    proven: bool
    why: str
    pause_s: float
    seconds: dict[str, float]
    cached_tokens_after: int
    canary_max_abs: float
    checked: int
    """Tensors whose checksums in the engine were the manifest's."""


class TryPart(Part):
    """One try to publish a version or to bring it to an engine; WeightTry has the words of `part` and `ended`."""

    part: str
    began_at: float
    seconds: float | None
    """None while it goes on."""
    ended: str
    why: str


class WeightTroublePart(Part):
    """A version that was not published, or not proven by an engine, at the first try."""

    version: int
    engine: str
    """Empty: its publication."""
    tries: list[TryPart]
    what: str
    """What went wrong in which part, in words."""
    ending: str
    """How it ended, in words."""
    settled: bool
    """This version got there in the end, or a later one has."""


class PolicyAgePart(Part):
    """Published versions that an engine's weights were behind when it was asked, over answered requests of training."""

    requests: dict[int, int]
    """How many requests, by versions behind."""
    mean: float | None
    most: int | None


class SpanningPart(Part):
    """Requests that were in flight while an engine took up a version, and all the tokens that they sampled."""

    version: int
    requests: int
    tokens: int


class PublicationPart(Part):
    version: int
    manifest: str
    digest: str
    bytes: int
    publish_latency_s: float
    """From the update's end to the proof of the slowest engine."""
    seconds: dict[str, float]
    published_at: float
    loads: list[LoadPart]
