"""NVIDIA Dynamo: its frontend, and its simulated workers as units: the two speak a protocol of their own.

What must stay true: workers are as fast as simulated units are, and Dynamo is set up to lose nothing:
streams migrate, and it routes by KV blocks. Flags: https://docs.nvidia.com/dynamo, as of 1.6.
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
_MIGRATIONS = "3"
"""How often a stream may go on elsewhere; its default is never."""
_DECODE_SPEED = "0.2"
"""Of its workers: about 50 ms a step."""
_READY = b"Registered endpoint 'dynamo.backend.generate'"
_START_S = 60.0
_WORDS = 32_000


class DynamoWorker:
    """The processes of one unit: a worker, which is one process and has no followers."""

    def __init__(self, name: str, folder: Path) -> None:
        self._log = folder / f"{name}.log"
        self._folder = folder
        self._process: Popen[bytes]

    def start(self) -> None:
        """Start it."""
        command = [_python(), "-m", "dynamo.mocker", "--model-path", str(_model(self._folder))]
        command += ["--model-name", "sim", "--decode-speedup-ratio", _DECODE_SPEED, *_PLANES]
        self._process = processes.start(["env", *_environment(self._folder), *command], self._log)

    def wait_ready(self) -> None:
        """Return when it takes requests. Raises RuntimeError."""
        give_up_at = time.monotonic() + _START_S
        while _READY not in self._log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"a worker of Dynamo did not start:\n{processes.tail(self._log)}")
            time.sleep(0.1)

    def pids(self) -> dict[str, int]:
        """Its process, as the leader."""
        return {"leader": self._process.pid}

    def stop(self) -> None:
        """End it, whatever state it is in."""
        processes.stop(self._process)


def frontend(workers: Sequence[str], folder: Path) -> list[str]:
    """The port and command of a frontend; it finds the workers by the files that they leave in the folder."""
    port = str(processes.free_port())
    command = [_python(), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port]
    flags = ["--router-mode", "kv", "--migration-limit", _MIGRATIONS, *_PLANES]
    flags += ["--router-min-initial-workers", str(len(workers))]
    return [port, "env", *_environment(folder), *command, *flags]


def _environment(folder: Path) -> list[str]:
    """Where workers are found; and a worker that cannot generate is to be found within a second."""
    return [
        f"DYN_FILE_KV={folder / 'dynamo'}",
        "DYN_HEALTH_CHECK_ENABLED=true",
        "DYN_CANARY_WAIT_TIME=1",
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT=1",
    ]


def _model(folder: Path) -> Path:
    """A folder with what workers read of a model: a tokenizer of words, and its size."""
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


def _python() -> str:
    if not _PYTHON.exists():
        raise RuntimeError("Dynamo is not installed. Type:  make peers")
    return str(_PYTHON)
