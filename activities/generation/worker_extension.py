"""What Ratchet adds to vLLM's worker: a weight reload that reaches every copy, one that is made ready before the pause
(twin.py), checksums of what was loaded, a way for weights from the trainer's memory (staged_transfer.py), and
on CPU the experts that a request's tokens went through.

Runs inside vLLM's process (`--worker-extension-cls`); its methods are called by name through `/collective_rpc`, by
EngineClient and nobody else. The caller has verified the files and, for a reload and an exchange, paused the engine: a
broken file here would take the whole server down.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from activities.generation.copies import renew_copies
from activities.generation.routing_capture import RoutingCapture
from activities.generation.serving_facts import serving_facts
from activities.generation.twin import Twin
from activities.publication.checksums import Received, checksums_of_model, remember
from activities.publication.tensors import tensors_below

TRANSFER = "ratchet"
"""Name of our weight-transfer backend in vLLM."""
SLICE_S = 0.1
"""For how long a call may keep the engine from its next step while weights are made ready."""

WeightTransferEngineFactory.register_engine(TRANSFER, "activities.generation.staged_transfer", "StagedTransfer")


class WorkerExtension:
    """Mixed into vLLM's worker class, which has `model_runner`."""

    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool
    _ratchet_routing: RoutingCapture | None
    _ratchet_twin: tuple[Twin, Received] | None = None

    def ratchet_prepare(self, path: str = "", digest: str = "") -> dict[str, Any]:
        """`{"ready": bool, "why": why it never will be, "longest_s": of the calls so far}`: go on making ready the
        safetensors below `path`, or the staged weights of that sha256, for ratchet_exchange. Others that were being
        made ready are forgotten."""
        try:
            twin, received = self._twin_of(path, digest)
            if not twin.ready and twin.more(SLICE_S):
                received.loaded()
        except Exception as error:
            # Whatever it is, the engine serves on, and its caller loads the weights in place.
            self._drop_twin()
            return {"ready": False, "why": str(error) or type(error).__name__, "longest_s": 0.0}
        return {"ready": twin.ready, "why": "", "longest_s": twin.longest_s}

    def ratchet_exchange(self, path: str = "", digest: str = "") -> dict[str, Any]:
        """`{"why": why not}`: exchange the model's weights for those that are ready."""
        if self._ratchet_twin is None:
            return {"why": "none are made ready"}
        twin, received = self._ratchet_twin
        if twin.key != (path or digest) or not twin.ready:
            return {"why": "these are not ready"}
        twin.exchange()
        remember(self.model_runner.get_model(), received)
        self.ratchet_forget()
        return {"why": ""}

    def _drop_twin(self) -> None:
        if self._ratchet_twin is not None:
            self._ratchet_twin[0].drop()
        self._ratchet_twin = None

    def _twin_of(self, path: str, digest: str) -> tuple[Twin, Received]:
        if self._ratchet_twin is None or self._ratchet_twin[0].key != (path or digest):
            self._drop_twin()
            received, staging = Received(), self.weight_transfer_engine.staging
            if path:
                tensors = tensors_below(Path(path))
                size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
            elif staging is not None and staging.ready and staging.digest == digest:
                tensors, size = staging.tensors(), staging.size
            else:
                raise ValueError("they are not staged")
            model = self.model_runner.get_model()
            self._ratchet_twin = Twin(path or digest, model, received.passing(tensors), size), received
        return self._ratchet_twin

    def ratchet_reload(self, path: str) -> dict[str, Any]:
        """Load the safetensors below `path` in place."""
        self._drop_twin()
        received, model = Received(), self.model_runner.get_model()
        self.model_runner.reload_weights(weights_iterator=received.passing(tensors_below(Path(path))))
        renew_copies(model)
        remember(model, received)
        return {}

    def ratchet_checksums(self) -> dict[str, Any]:
        """`{"given": {name: checksum}, "held": [[checksum, [names]]]}`: of each tensor that the model was given in its
        last load, and of each parameter that says which of them it holds. On CPU most matrices are packed for their
        kernel, where they can't be seen: the canary does."""
        given, held = checksums_of_model(self.model_runner.get_model())
        return {"given": given, "held": held}

    def ratchet_forget(self) -> dict[str, Any]:
        """Forget what was staged or made ready, and a weight update that nobody ended."""
        self._drop_twin()
        self._weight_update_active = False
        self.weight_transfer_engine.forget()
        return {}

    def ratchet_staged(self) -> dict[str, Any]:
        """`{"ready": bool, "failed": why, "digest": sha256}` of what is being staged."""
        staging = self.weight_transfer_engine.staging
        if staging is None:
            return {"ready": False, "failed": "nothing is being staged", "digest": ""}
        return {"ready": staging.ready, "failed": staging.failed, "digest": staging.digest}

    def ratchet_serving(self) -> dict[str, Any]:
        """How this engine serves; serving_facts.py has the fields."""
        return dict(serving_facts(self.model_runner))

    def ratchet_routed(self, request_id: str = "", start: int = 0, stop: int = 0) -> dict[str, Any]:
        """`{"experts": text}`: base64 of a .npy [stop - start, layers, experts per token], with -1 for what is not
        known. Recording begins with the first call; of a request that was answered before the text is empty."""
        capture: RoutingCapture | None = getattr(self, "_ratchet_routing", None)
        if capture is None:
            capture = self._ratchet_routing = RoutingCapture(self.model_runner)
        return {"experts": capture.taken(request_id, start, stop)}

    def ratchet_digest(self) -> dict[str, Any]:
        """`{"digest": hex}`: equal for equal weights of one engine. The bits of each parameter are summed where they
        lie, so that a large model costs milliseconds. On CPU, vLLM keeps packed copies only of most matrices, which
        this can't see: the canary does."""
        import torch

        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        lines = []
        for name, tensor in sorted(self.model_runner.get_model().named_parameters()):
            bits = tensor.detach().view(integers[tensor.element_size()])
            lines.append(f"{name} {tuple(bits.shape)} {bits.sum(dtype=torch.int64)}")
        return {"digest": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
