"""Messages between TrainingRun and the trainer, the publication and the engines."""

from __future__ import annotations

from workflows.contracts.base import Message, Timing
from workflows.contracts.words import InFlight, KvPlan


class EngineInfo(Message):
    name: str
    """Unique over hosts, e.g. `local-e0`."""
    host: str
    url: str


class LeaseEnginesInput(Message):
    run: str


class LeaseEnginesOutput(Message):
    held_by: str = ""
    """The run that holds the engines; empty when the lease was given."""


class TrainerInput(Message):
    """Bring a warm trainer up for this run and make its state durable as step 0.

    In this and the next messages `config` is the run's configuration with `model` made an absolute folder."""

    run: str
    config: dict[str, object]
    resume_checkpoint: str = ""


class TrainerOutput(Message):
    checkpoint: str
    parameters: int
    world_size: int


class UpdateInput(Message):
    run: str
    config: dict[str, object]
    batch_id: str
    step: int
    policy_version: int


class UpdateOutput(Message):
    step: int
    checkpoint: str
    """Key of the manifest of the training state after the step; empty where no step was made."""
    metrics: dict[str, float]
    void: str = ""
    """Why no step was made: the batch taught nothing and is used up. Empty when it trained."""
    dropped: dict[str, int] = {}
    """Groups of the batch that trained nothing, by reason."""
    warning: str = ""
    """What a person should know of the step; empty when it was as it should be."""
    timing: Timing = Timing()


class ScoreInput(Message):
    """How far are the policies that made these groups' tokens from the committed state `checkpoint`?"""

    run: str
    config: dict[str, object]
    checkpoint: str
    groups: list[int]
    """By number."""


class ScoreOutput(Message):
    divergences: list[float]
    """Of each group: mean k3 divergence of its sampled tokens, in nats."""
    timing: Timing = Timing()


class PublishInput(Message):
    run: str
    config: dict[str, object]
    version: int
    step: int
    checkpoint: str
    again: bool = False
    """No engine could load it: what is damaged of it in the object store is replaced."""


class PublishOutput(Message):
    version: int
    manifest: str
    """Object-store key of the weights' manifest."""
    digest: str
    bytes: int
    seconds: dict[str, float] = {}


class ServeInput(Message):
    """Have an engine serve the architecture of this model; heartbeats until it answers."""

    run: str
    engine: EngineInfo
    model: str
    context_length: int
    dtype: str = "auto"


class ServeOutput(Message):
    engine: str
    restarted: bool
    seconds: float


class ApplyInput(Message):
    run: str
    engine: EngineInfo
    version: int
    manifest: str
    in_flight: InFlight = InFlight.KEEP
    kv: KvPlan = KvPlan.DROP


class RestInput(Message):
    """Have an engine give its device to the trainer; the next `apply` wakes it."""

    run: str
    engine: EngineInfo


class ApplyOutput(Message):
    engine: str
    version: int
    proven: bool
    pause_s: float
    """How long the engine made no token for the exchange."""
    slice_s: float = 0.0
    """The longest that it made none before, between two of its steps, while it made the weights ready."""
    seconds: dict[str, float] = {}
    """`download`, `prepare`, `drain` (the end of what was in flight, or of its step), `load`, `prove`."""
    cached_tokens_after: int = 0
    canary_max_abs: float = 0.0
    checked: int = 0
    """Tensors whose checksums in the engine were the manifest's."""
    why: str = ""
