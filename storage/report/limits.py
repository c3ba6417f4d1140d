"""The limits that the six verdicts of a report are given by.

limits.toml beside this module has their defaults and says what each means; a file of the user's overrides some of them.
Called by `ratchet report`.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workflows.errors import InvalidConfig

DEFAULTS = Path(__file__).with_name("limits.toml")

Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BatchLimits(Section):
    time_to_batch_s: Seconds
    tail_share: Share
    slow_step_ratio: float = Field(ge=1)
    slow_step_s: Seconds
    slow_steps: Count
    short_share: Share
    void_share: Share


class FreshnessLimits(Section):
    off_policy_steps: int = Field(ge=-1)
    divergence: float = Field(ge=0)
    effective_sample_size: Share
    dropped_share: Share


class NumericsLimits(Section):
    mismatch_kl: float = Field(ge=0)
    far_share: Share
    corrected_share: Share


class EnvironmentLimits(Section):
    infra_share: Share
    outage_share: Share
    outage_losses: Count
    task_loss_share: Share
    task_losses: Count
    flaky_tasks: Count
    quarantined_tasks: Count
    quarantined_token_share: Share
    dead_hosts: Count


class PublicationLimits(Section):
    publish_s: Seconds
    pause_s: Seconds
    unproven_loads: Count
    versions_behind: Count
    cached_tokens: Count


class EvaluationLimits(Section):
    excluded_share: Share


class CostLimits(Section):
    gpus: float = Field(ge=0)
    gpu_hour_price: float = Field(ge=0)


class AuditLimits(Section):
    samples: int = Field(ge=2)
    verify_deviations: float = Field(ge=0)
    verify_ratio: float = Field(ge=1)
    verify_s: Seconds
    few_commands_ratio: float = Field(ge=1)
    few_commands: Count


class Limits(Section):
    """All of them; limits.toml says what each means."""

    batch: BatchLimits
    freshness: FreshnessLimits
    numerics: NumericsLimits
    environment: EnvironmentLimits
    publication: PublicationLimits
    evaluation: EvaluationLimits
    audit: AuditLimits
    cost: CostLimits


@lru_cache(maxsize=1)
def default_limits() -> Limits:
    return Limits.model_validate(tomllib.loads(DEFAULTS.read_text(encoding="utf-8")))


def read_limits(path: Path) -> Limits:
    """The defaults with what the file says instead. Raises InvalidConfig with one line per mistake."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfig(f"{path} can't be read as limits: {error}") from None
    merged: dict[str, Any] = default_limits().model_dump()
    for section, values in given.items():
        known = section in merged and isinstance(values, dict)
        merged[section] = merged[section] | values if known else values
    try:
        return Limits.model_validate(merged)
    except ValidationError as error:
        raise InvalidConfig("\n".join(f"{path}: {_mistake(item)}" for item in error.errors())) from None


def _mistake(item: Any) -> str:
    where = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        section = Limits.model_fields[where[0]].annotation if len(where) > 1 else Limits
        known = ", ".join(getattr(section, "model_fields", {}))
        return f"there is no limit {'.'.join(where)}; there {'in this table ' * (len(where) > 1)}are: {known}"
    return f"{'.'.join(where)}: {item['msg']} (given: {item['input']!r})"
