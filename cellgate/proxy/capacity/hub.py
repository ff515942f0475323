"""Where the hub's client keeps the files of a model that it has downloaded. Nothing is asked of the network.

Layout: `HUB/models--ORG--NAME/snapshots/COMMIT/`, and the commit of a branch in `refs/BRANCH`
(huggingface_hub, "Understand caching").
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def snapshot(model: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the model's branch `main`, or of the commit fetched last; None: not in the cache."""
    if not MODEL_ID.fullmatch(model):
        return None
    folder = hub(environ) / f"models--{model.replace('/', '--')}"
    branch = folder / "refs" / "main"
    if branch.is_file() and (found := folder / "snapshots" / branch.read_text().strip()).is_dir():
        return found
    commits = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    return max(commits, key=lambda path: path.stat().st_mtime, default=None)


def hub(environ: Mapping[str, str] = os.environ) -> Path:
    """The cache, as `HF_HUB_CACHE`, `HF_HOME` and `XDG_CACHE_HOME` say, in this order."""
    if given := environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{caches}/huggingface").expanduser() / "hub"
