"""NVIDIA Dynamo's programs: its simulated workers (`dynamo.mocker`), and frontends before them.

Workers and frontends find each other by the files that they leave in a folder, and talk on
127.0.0.1 only.
Flags: https://docs.nvidia.com/dynamo, as of 1.6.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

from loadtests.kit import processes

ROOT = Path(__file__).resolve().parents[2]
_PYTHON = ROOT / ".venv-dynamo" / "bin" / "python"
_PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
_READY = b"Registered endpoint 'dynamo.backend.generate'"
_START_S = 60.0
_WORDS = 32_000


def mocker(model: Path, name: str, meeting: Path, *flags: str) -> list[str]:
    """The command of a worker that serves `model` by that name, and says so in the folder `meeting`.
    Raises RuntimeError when Dynamo is not installed.
    """
    command = ["dynamo.mocker", "--model-path", str(model), "--model-name", name]
    return [*_started_at(meeting), *command, *_PLANES, *flags]


def frontend(port: int, meeting: Path, *flags: str) -> list[str]:
    """The command of a frontend at `port` before the workers that it finds in the folder `meeting`.
    Raises RuntimeError when Dynamo is not installed.
    """
    command = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    return [*_started_at(meeting), *command, *_PLANES, *flags]


def wait_registered(process: Popen[bytes], log: Path) -> None:
    """Return when a worker takes requests. Raises RuntimeError."""
    give_up_at = time.monotonic() + _START_S
    while _READY not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"a worker of Dynamo did not start:\n{processes.tail(log)}")
        time.sleep(0.1)


def word_model(folder: Path) -> Path:
    """A folder with what workers read of a model: its size, and a tokenizer of the words w0 to w31999."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(_WORDS))]
        for name, document in _model_files(words).items():
            (model / name).write_text(json.dumps(document))
    return model


def _model_files(words: Sequence[str]) -> dict[str, object]:
    vocabulary = {word: number for number, word in enumerate(words)}
    rest = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
        | dict.fromkeys(rest),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}",
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(words),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "max_position_embeddings": 131_072,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }


def _started_at(meeting: Path) -> list[str]:
    if not _PYTHON.exists():
        raise RuntimeError("not installed; type:  make .venv-dynamo/made")
    return ["env", f"DYN_FILE_KV={meeting}", *(f"{host}=127.0.0.1" for host in _HOSTS), str(_PYTHON), "-m"]
