"""A SGLang server on a CPU: `python server.py OPTIONS OF SGLANG`, inside .venv-sglang.

SGLang imports the packages of CUDA's kernels, and others that a text model does not need, wherever it runs.
What it imports and never calls stands in for them here, for SGLang alone: other packages ask which of them
are installed.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = frozenset(
    {
        "sgl_kernel",
        "flashinfer",
        "deep_gemm",
        "flash_attn",
        "humming",
        "kernels",
        "torch_memory_saver",
        "tml_renderers",
        "deepseek_recipe",
        "torchvision",
        "torchaudio",
        "torchcodec",
        "timm",
        "decord",
        "decord2",
        "IPython",
        "datasets",
        "modelscope",
        "soundfile",
        "scipy",
        "gguf",
        "blobfile",
    }
)
FRAMES = 14
"""So many callers are looked through for the one that imports."""


class _Named(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    """A module that has every attribute: a class that can be instantiated, called and used to decorate."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__init__": lambda *_, **__: None, "__call__": lambda self, *_, **__: self}
        made = _Named(name, (), members)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT and _is_for_sglang():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def _is_for_sglang() -> bool:
    """Whether SGLang imports, and not transformers, at its wish."""
    frame = sys._getframe(2)
    for _ in range(FRAMES):
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("transformers", "sglang")):
            return bool(name.startswith("sglang"))
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


sys.meta_path.append(_Finder())
# Its child processes import this file as well, and must find the same. These come before SGLang, which would
# change what they find.
import transformers.models.auto.processing_auto  # type: ignore[import-not-found] # noqa: E402
import transformers.models.llama.modeling_llama  # type: ignore[import-not-found] # noqa: E402, F401

if __name__ == "__main__":
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    run_server(prepare_server_args(sys.argv[1:]))
