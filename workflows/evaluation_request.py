"""What an evaluation may be asked for: the JSON of `temporal workflow start --type Evaluation`, of a schedule, of
examples/evaluation.

`parse_evaluation` is what Evaluation calls on the raw input; every mistake comes back as one message that names the
field and what is allowed. What a field leaves open is as in the run's own configuration.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

EXAMPLE = "examples/evaluation/as-served.json"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingRequest(Section):
    """How answers are sampled and how long an episode may go on; null: as in the run."""

    temperature: float | None = Field(None, ge=0, le=2, description="0: always the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="0: off.")
    min_p: float | None = Field(None, ge=0, lt=1)
    max_turns: int | None = Field(None, ge=1, le=100, description="Generations per episode.")
    max_tokens_per_turn: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="Sampled tokens per episode.")


class ServingRequest(Section):
    """How the engines are to serve meanwhile; null: as in the run. They stay so until the next run or evaluation."""

    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    quantization: Literal["int8"] | None = Field(
        None,
        description="int8: linear layers with int8 weights, a scale per channel, and int8 activations, a scale per"
        " token (W8A8 of compressed-tensors).",
    )
    context_length: int | None = Field(None, ge=32, description="Prompt and sampled tokens together, per episode.")


class EvaluationRequest(Section):
    """The whole input."""

    run: str | None = Field(None, min_length=1, description="The run whose policy is evaluated.")
    version: int | None = Field(None, ge=0, description="One of its published versions; null: the newest.")
    manifest: str | None = Field(
        None, min_length=1, description="Key of published weights in the object store, instead of run and version."
    )
    taskset: str | None = Field(None, min_length=1, description="Name of a taskset, or a folder of tasks.")
    tasks: int | None = Field(None, ge=1, le=1000, description="Held-out tasks.")
    samples_per_task: int | None = Field(None, ge=1, le=64)
    seed: int | None = Field(None, ge=0, lt=2**31, description="Chooses the tasks and the samples.")
    concurrency: int | None = Field(None, ge=1, le=1024, description="Episodes in flight.")
    sampling: SamplingRequest = SamplingRequest()
    serving: ServingRequest = ServingRequest()

    @model_validator(mode="after")
    def _one_policy(self) -> EvaluationRequest:
        if self.run is None and self.manifest is None:
            raise ValueError("run: missing; name a run, or weights by manifest")
        if self.manifest is not None and (self.run is not None or self.version is not None):
            raise ValueError("manifest: it says which run and version it is: leave those out")
        return self


def parse_evaluation(raw: object) -> EvaluationRequest:
    """The validated request. Raises ValueError with one line per mistake: field, fault, what was given."""
    if not isinstance(raw, dict):
        raise ValueError(f"the input must be one JSON object as in {EXAMPLE}, not {type(raw).__name__}")
    try:
        return EvaluationRequest.model_validate(raw)
    except ValidationError as error:
        raise ValueError("\n".join(_describe(item) for item in error.errors())) from None


def _describe(item: Any) -> str:
    field = ".".join(map(str, item["loc"]))
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        section = EvaluationRequest.model_fields.get(str(item["loc"][0])) if len(item["loc"]) > 1 else None
        model = section.annotation if section is not None else EvaluationRequest
        return f"{field}: unknown field; allowed here: {', '.join(sorted(getattr(model, 'model_fields', {})))}"
    return f"{field}: {message} (given: {item['input']!r})" if field else message
