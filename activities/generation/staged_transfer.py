"""vLLM's weight-transfer backend `ratchet`: weights are staged while the engine goes on, and exchanged in one call.

Registered by the worker extension, as vLLM documents it for backends of one's own; runs inside vLLM's worker and is
called through its `/start_weight_update`, `/update_weights` and `/finish_weight_update`, by EngineClient and nobody
else. Promises: until `finish` the model is not touched; `finish` loads verified weights or raises before it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from activities.generation.copies import renew_copies
from activities.generation.staging import Staging
from activities.publication.checksums import Received, remember


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to agree upon beforehand."""


@dataclass
class StagedInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to stage, as Staging takes it."""

    source: str
    digest: str
    size: int
    bytes_per_s: float = 0.0


class StagedTransfer(WeightTransferEngine[NoInfo, StagedInfo]):  # type: ignore[misc]
    """`staging` is what was asked for last; None when nothing is, or it is loaded."""

    init_info_cls = NoInfo
    update_info_cls = StagedInfo
    staging: Staging | None = None

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self.forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would wait for an accelerator here: nothing is on one yet.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StagedInfo) -> None:
        self.staging = Staging(update_info.source, update_info.digest, update_info.size, update_info.bytes_per_s)

    def finish_weight_update(self) -> None:
        if self.staging is None or not self.staging.ready:
            raise RuntimeError("no verified weights are staged")
        received = Received()
        initialize_layerwise_reload(self.model)
        self.model.load_weights(received.passing(self.staging.tensors()))
        finalize_layerwise_reload(self.model, self.model_config)
        renew_copies(self.model)
        remember(self.model, received)
        self.forget()

    def forget(self) -> None:
        if self.staging is not None:
            self.staging.drop()
        self.staging = None

    def shutdown(self) -> None:
        self.forget()
