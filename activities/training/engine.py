"""The policy under DeepSpeed, in this process, which is one rank of the trainer. Owns the module, its optimizer and its
random state.

Promises: what it holds is exactly some step, or it says `half_done`; training state that it loads is whole or refused;
dropout is off, so that log-probabilities are a function of weights and tokens. Not thread-safe: TrainerService calls
everything from one thread. With several processes each has one, and all call the same methods (ranks.everywhere).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from activities.publication.manifest import TensorInfo
from activities.training.adapter import adapter_tensors, config_of, merged, with_adapter
from activities.training.batch import MicroBatch
from activities.training.deepspeed_config import deepspeed_config
from activities.training.logprobs import sampled_logprobs
from activities.training.ranks import join, rank, world_size
from activities.training.routing_replay import RoutingReplay
from workflows.config import TrainingConfig
from workflows.errors import TrainerError

TAG = "state"
"""DeepSpeed's name for a checkpoint: the folder that a training state consists of."""
UNIVERSAL = "universal"
"""The same for one that any number of processes can load."""
CLIENT = "ratchet"


class Trainer:
    """One policy and its optimizer."""

    def __init__(self, folder: Path, training: TrainingConfig, *, seed: int) -> None:
        """Load the Hugging Face model in `folder`. Raises TrainerError (final) when it can't be trained as it is."""
        import deepspeed
        from transformers import AutoModelForCausalLM

        join()
        self.world_size, self.rank = world_size(), rank()
        self.folder = folder
        self.cuda = torch.cuda.is_available()
        bfloat16 = training.dtype == "bfloat16" or (training.dtype == "auto" and self.cuda)
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        config = deepspeed_config(training, bfloat16=bfloat16)
        self.zero_stage = int(config["zero_optimization"].get("stage", 0))
        self.max_grad_norm = training.max_grad_norm
        _seed_everything(seed)
        if not folder.is_dir():
            # The library would ask the network for an adapter of that name first, six times.
            raise TrainerError(f"{folder}: there is no such folder", retryable=False)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, **_attention(training)
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TrainerError(f"{folder}: not a causal language model: {error}", retryable=False) from error
        self._plain, self._names = model, _own_names(model)
        self.tensors = _own_tensors(model, self.dtype)
        _require_file_names(folder, self.tensors)
        self.vocab_size = int(model.config.vocab_size)
        self.parameters: int = sum(parameter.numel() for parameter in model.parameters())
        model.config.use_cache = False
        self._adapter_scale, self.adapter_config = 0.0, dict[str, Any]()
        if training.lora_rank:
            model = with_adapter(model, training, folder)
            self.adapter_config = config_of(model)
            self._adapter_scale = self.adapter_config["lora_alpha"] / training.lora_rank
        self.routing = RoutingReplay(model) if training.replay_routing else None
        if training.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[item for item in model.parameters() if item.requires_grad], config=config
        )
        if training.activation_checkpointing:
            # transformers recomputes in training mode only; without dropout the two modes are one function.
            _without_dropout(self._engine.module)
            self._engine.train()
        else:
            self._engine.eval()
        self._reference = _frozen(folder, training, self.dtype, self.device) if training.kl_coefficient else None
        self.half_done = False
        self.updates = 0
        """Updates that these weights have seen, over all runs that led to them: the clock of the warm-up."""

    @property
    def module(self) -> Any:
        return self._engine.module

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    def logprobs(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs [N], entropy [N]) of the sampled tokens of a micro-batch, at their temperatures."""
        if self.routing is not None:
            self.routing.take(micro.experts_BTLK)
        return self._sampled(self._engine, micro)

    def _sampled(self, model: Any, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BTV = model(
            input_ids=micro.token_ids_BT,
            attention_mask=micro.attention_mask_BT,
            position_ids=micro.position_ids_BT,
            use_cache=False,
        ).logits
        return sampled_logprobs(logits_BTV, micro.token_ids_BT, micro.loss_mask_BT, micro.temperature_BT)

    def frozen_logprobs(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` without a gradient."""
        with torch.no_grad():
            return self.logprobs(micro)

    def reference_logprobs(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` under the model in `folder`, which never changes. Only with `training.kl_coefficient` above 0."""
        assert self._reference is not None
        return self._sampled(self._reference, micro)

    def accumulate(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch's share of the loss; `last`: the step's final one."""
        self.half_done = True
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def optimizer_step(self, *, learning_rate: float, weight_decay: float) -> float:
        """Clip, step, clear the gradients; the global norm before the clip. Raises TrainerError (final) where it is not
        finite. The weights are half done until `end_update`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, weight_decay
        norm = self._plain_norm() if self.zero_stage == 0 else 0.0
        self._engine.step()
        if self.zero_stage:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
        if not np.isfinite(norm):
            raise TrainerError(f"the gradient norm is {norm}", retryable=False)
        return norm

    def end_update(self) -> None:
        """All optimizer steps of an update are made: the weights are a step again."""
        self.updates += 1
        self.half_done = False

    def _plain_norm(self) -> float:
        gradients = [item.grad for item in self.module.parameters() if item.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(item) for item in gradients])))

    def save_state(self, folder: Path) -> Path:
        """Write the whole training state below `folder`; the sub-folder that it consists of."""
        if self.half_done:
            raise TrainerError("half a step can't be saved")
        client = {
            "updates": self.updates,
            "world_size": self.world_size,
            "zero_stage": self.zero_stage,
            "dtype": str(self.dtype),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.cuda else [],
            "numpy_rng": np.random.get_state(),
            "python_rng": random.getstate(),
        }
        self._engine.save_checkpoint(str(folder), tag=TAG, client_state={CLIENT: client}, save_latest=False)
        return folder / TAG

    def state_files(self) -> set[str]:
        """Names of the files that a training state of this engine consists of."""
        prefix, ranks = "bf16_" if self.dtype is torch.bfloat16 else "", range(self.world_size)
        optimizers = {f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks}
        if self.zero_stage == 3:
            return {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks} | optimizers
        return {"mp_rank_00_model_states.pt"} | (optimizers if self.zero_stage else set())

    def load_state(self, folder: Path) -> None:
        """Take over the training state in `folder/state`, to the bit. Only on a freshly built trainer.

        Raises TrainerError (final) where the state is not whole or belongs to another arrangement of the model.
        """
        found = {path.name for path in (folder / TAG).iterdir()}
        if missing := self.state_files() - found:
            raise TrainerError(f"the training state lacks {', '.join(sorted(missing))}", retryable=False)
        client = self._load(folder, TAG)
        for name, ours in (
            ("world_size", self.world_size),
            ("zero_stage", self.zero_stage),
            ("dtype", str(self.dtype)),
        ):
            if client[name] != ours:
                raise TrainerError(
                    f"the training state was saved with {name} {client[name]}, this trainer has {ours}", retryable=False
                )
        self.updates = int(client["updates"])
        torch.set_rng_state(client["torch_rng"])
        np.random.set_state(client["numpy_rng"])
        random.setstate(client["python_rng"])
        if self.cuda:
            torch.cuda.set_rng_state_all(client["cuda_rng"])
        if self.updates and not any(self._engine.optimizer.optimizer.state.values() if self.zero_stage else [1]):
            raise TrainerError("the training state holds no optimizer moments", retryable=False)
        self.half_done = False

    def load_universal(self, folder: Path) -> None:
        """Take over the training state in `folder/universal`, whose number of processes was another: weights, moments
        and updates, but not the random state, which trains nothing. Only on a freshly built trainer of ZeRO stage 1 or
        2. Raises TrainerError (final) where it does not fit."""
        self._engine._config.load_universal_checkpoint = True
        try:
            client = self._load(folder, UNIVERSAL)
        finally:
            self._engine._config.load_universal_checkpoint = False
        if client["dtype"] != str(self.dtype):
            raise TrainerError(
                f"the training state was saved with dtype {client['dtype']}, this trainer has {self.dtype}",
                retryable=False,
            )
        self.updates = int(client["updates"])
        self.half_done = False

    def _load(self, folder: Path, tag: str) -> dict[str, Any]:
        """DeepSpeed's load of `folder/<tag>`; Ratchet's own part of it. The weights are half done from then on."""
        self.half_done = True
        try:
            path, extra = self._engine.load_checkpoint(str(folder), tag=tag)
        except (RuntimeError, KeyError, ValueError, AssertionError) as error:
            raise TrainerError(f"the training state does not fit {self.folder}: {error}", retryable=False) from error
        if path is None or CLIENT not in (extra or {}):
            raise TrainerError("the training state lacks Ratchet's own part", retryable=False)
        client: dict[str, Any] = extra[CLIENT]
        return client

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's own tensors as they are served: on the CPU, contiguous, in the run's dtype, tied ones once.

        On the CPU they share the trainer's memory: use them before the next step."""
        state = self._whole()
        if state and self.adapter_config:
            state = {name: merged(state, name, self._adapter_scale) for name in self._names}
        kept = {item.name: getattr(torch, item.dtype) for item in self.tensors}
        return {
            name: value.detach().to("cpu", kept[name]).contiguous()
            for name, value in _as_saved(self._plain, state).items()
            if name in kept
        }

    def adapter(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors, under PEFT's names; empty where the model itself trains."""
        return adapter_tensors(self._whole()) if self.adapter_config else {}

    def _whole(self) -> dict[str, torch.Tensor]:
        """Every tensor of the module. Stage 3 gathers on rank 0; the others have nothing to say."""
        if self.half_done:
            raise TrainerError("half a step can't be exported")
        if self.zero_stage == 3:
            return self._engine._zero3_consolidated_16bit_state_dict() or {}
        return dict(self.module.state_dict())

    @classmethod
    def build(cls, folder: Path, training: TrainingConfig, seed: int) -> Trainer:
        """The constructor as a function that other processes can be told."""
        return cls(folder, training, seed=seed)

    def close(self) -> None:
        """Let go of the memory."""
        self._engine.destroy()
        del self._engine


def _without_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _attention(training: TrainingConfig) -> dict[str, str]:
    return {} if training.attention == "auto" else {"attn_implementation": training.attention}


def _frozen(folder: Path, training: TrainingConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The reference policy of the KL term: on the device, without gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **_attention(training))
    model.config.use_cache = False
    return model.to(device).eval().requires_grad_(False)


def _own_tensors(model: Any, dtype: torch.dtype) -> list[TensorInfo]:
    """Name, shape and dtype of everything that makes the model: parameters (a tied one under its first name, frozen
    ones too) and the buffers that are saved with it."""
    state = model.state_dict()
    saved = _as_saved(model, {name: state[name] for name in _own_names(model)})
    return [
        TensorInfo(
            name=name,
            shape=list(value.shape),
            dtype=str(dtype if value.is_floating_point() else value.dtype).removeprefix("torch."),
        )
        for name, value in saved.items()
    ]


def _own_names(model: Any) -> list[str]:
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first = {name for name, _ in model.named_parameters()}
    return [name for name in model.state_dict() if name not in aliases or name in first]


def _as_saved(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as the model's files have them: transformers holds experts of a layer as one, files one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return saved


def _require_file_names(folder: Path, tensors: list[TensorInfo]) -> None:
    """Engines load the names of the model's files. Raises TrainerError (final) where the modules have others."""
    from safetensors import safe_open

    known: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            known.update(file.keys())
    if known and (unknown := {item.name for item in tensors} - known):
        names = ", ".join(sorted(unknown)[:5])
        raise TrainerError(f"{folder}: its files know no {names}: no engine could load them", retryable=False)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
