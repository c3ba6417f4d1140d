"""Sections `publication` and `evaluation`: what becomes of new weights, and how good they are on held-out tasks."""

from __future__ import annotations

from pydantic import Field

from workflows.config.base import Section
from workflows.contracts import InFlight, KvPlan, WeightChannel


class EvaluationConfig(Section):
    """Held-out evaluation, before the first and after the last update, and every `every` updates between."""

    tasks: int = Field(48, ge=0, le=1000, description="Held-out tasks; 0 switches evaluation off.")
    samples_per_task: int = Field(1, ge=1, le=64)
    every: int = Field(0, ge=0, description="Updates between evaluations; 0: only the first and the last.")


class PublicationConfig(Section):
    """How new weights are kept, and how engines take them."""

    keep_last: int = Field(2, ge=1, description="Versions whose weights and training state are kept.")
    keep_every: int = Field(
        0, ge=0, description="Weights of every so many versions, from the first on, are kept for good; 0: of none."
    )
    full_every: int = Field(
        1,
        ge=1,
        le=100,
        description="Every so many versions the weights go to the object store whole, between them as what changed"
        " since the version before; 1: always whole. Pays in bfloat16 at learning rates up to 1e-5. Above 1 with"
        " training.lora_rank: after the first version only the adapter goes there.",
    )
    max_mbytes_per_s: float = Field(
        0.0, ge=0, description="What one transfer of weights may take of the network, in MB/s; 0: all there is."
    )
    in_flight: InFlight = Field(
        InFlight.KEEP,
        description="Requests under way at a load: finish; abort_continue (cut, and continued from their tokens under"
        " the new weights); or keep (frozen meanwhile).",
    )
    kv: KvPlan = Field(
        KvPlan.DROP,
        description="The engine's cache at a load: drop; salt (new requests never find what older weights filled); or"
        " keep (they do, which mixes weights within a token).",
    )
    rolling: bool = Field(
        False, description="Load engines in turns, so that at least half of them serve; false: all at once."
    )
    store_every: int = Field(
        10,
        ge=1,
        le=1000,
        description="weight_channel direct and colocated: every so many versions the weights go to the object store,"
        " too.",
    )

    def stores(self, version: int, channel: WeightChannel) -> bool:
        """Whether the weights of this version go to the object store."""
        return channel is WeightChannel.S3 or version % self.store_every == 0
