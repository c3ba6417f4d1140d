"""Messages between Episode and the generation worker, and the record of a turn's tokens."""

from __future__ import annotations

from pydantic import Field

from workflows.contracts.base import Message, TaskRef, Timing
from workflows.contracts.words import SHELL_HARNESS, ActionKind, FinishReason, KvPlan


class Sampling(Message):
    """Sampling parameters of a generation. Training allows temperature alone, above 0."""

    temperature: float = Field(ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0: off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(ge=1)
    """Most tokens of this turn."""
    context_length: int = Field(ge=16)
    """Most tokens of prompt and answer together."""

    @property
    def truncation(self) -> dict[str, float]:
        """Those of top_p, top_k and min_p that are on."""
        given = {"top_p": (self.top_p, 1.0), "top_k": (self.top_k, 0), "min_p": (self.min_p, 0.0)}
        return {name: value for name, (value, off) in given.items() if value != off}


class Action(Message):
    """What the sampled text asks for. `command` for COMMAND, `answer` for FINAL, `error` for MALFORMED."""

    kind: ActionKind
    command: str = ""
    answer: str = ""
    error: str = ""


class GenerateInput(Message):
    run: str
    attempt_id: str
    session: str
    """Routing key of the episode: its later turns go where its cache is."""
    turn: int = Field(ge=0)
    model: str
    """Folder of the run's model: its tokenizer and chat template."""
    task: TaskRef
    segments: list[str] = []
    """Object-store keys of the segments of the earlier turns, oldest first."""
    observation: str | None = None
    """What the agent sees of its last action; None in turn 0."""
    sampling: Sampling
    seed: int = Field(ge=0)
    priority: int = 0
    """Lower goes first, wherever requests wait."""
    started_at: float = 0.0
    """When the attempt began, seconds since the epoch: where requests wait, the turns of older attempts go first."""
    kv: KvPlan = KvPlan.DROP
    pinned_version: int | None = None
    """The only policy version that may answer; None: whatever serves the run."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that an engine may take for the answer; waiting until one has room is not part of them."""
    harness: str = SHELL_HARNESS


class GenerateOutput(Message):
    segment: str | None
    """Object-store key of this turn's segment; None when the context was full."""
    action: Action
    text: str = ""
    """The sampled text for people, cut to 2,000 characters."""
    finish_reason: FinishReason
    engine: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    asked_at: float = 0.0
    """When an engine was first asked, seconds since the epoch."""
    timing: Timing = Timing()


UNKNOWN_EXPERT = -1
"""In a segment's routed experts, for a token that came from a cache."""


class Segment(Message):
    """One turn's tokens: the prompt tokens that this turn added, then the sampled ones. Aligned lists of length T.

    A trajectory is the concatenation of the segments of one branch. Example of a turn whose observation has two tokens
    and whose answer has three::

        Segment(turn=1, token_ids=[12, 7, 40, 41, 2], loss_mask=[0, 0, 1, 1, 1],
                logprobs=[0.0, 0.0, -0.1, -0.7, -0.01], versions=[-1, -1, 3, 3, 4], temperature=1.0, ...)
    """

    turn: int
    token_ids: list[int]
    loss_mask: list[int]
    """1 for a sampled token (a sampled stop token too), 0 for every other."""
    logprobs: list[float]
    """Natural log, at `temperature`; 0.0 where the mask is 0."""
    versions: list[int]
    """policy_version per token as the engine reported it; -1 where the mask is 0."""
    temperature: float
    finish_reason: FinishReason
    text: str
    engine: str
    cached_tokens: int = 0
    routed_experts: str = ""
    """Of a mixture-of-experts policy, which experts its tokens went through in the engine: base64 of a .npy of shape
    (tokens, layers, experts per token), from the last token before this turn's, which had not been through yet when it
    was sampled, to this turn's last but one. Empty where the engine does not say."""
    branch: int = 0
    """Which of the episode's conversations the turn is in. A branch that forks from an earlier turn begins with the ids
    of that turn and all before it as its prompt, with mask 0; one of its own begins with a prompt of its own."""
