"""Make a LoRA adapter for the tiny model: random weights, large enough to change the text.

Runs inside .venv-vllm as a script: `python make_adapter.py FOLDER SEED`.
"""

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

RANK, HIDDEN, LAYERS = 8, 256, 2
OUTPUTS = {"q_proj": 256, "v_proj": 128}


def main(folder: Path, seed: int) -> None:
    """Write the two files that engines read."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, outputs in OUTPUTS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(OUTPUTS),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
