"""Names that clients use for models: aliases, splits between versions, and what to fall back to."""

from __future__ import annotations

from collections.abc import Mapping

from cellgate.proxy.config.settings import Split
from cellgate.proxy.config.values import MisfitError, weight

_SPLIT = "the name of a model, or models with weights such as {v1: 95, v2: 5}"


def model_names(found: object) -> Mapping[str, Split]:
    """What serves each name. A name may stand for a model of the same name, and not for another name."""
    if not isinstance(found, dict) or not all(isinstance(name, str) and name for name in found):
        raise MisfitError("a mapping of names, each with " + _SPLIT)
    splits = {name: _split(name, value) for name, value in found.items()}
    for name, split in splits.items():
        for model, _ in split:
            if model != name and model in splits:
                raise ValueError(
                    f"{name}: {model!r} is a name of this list as well; name the models of units here"
                )
    return splits


def _split(name: str, found: object) -> Split:
    if isinstance(found, str) and found:
        return ((found, 1.0),)
    if not isinstance(found, dict) or not found or not all(isinstance(m, str) and m for m in found):
        raise ValueError(f"{name}: expected {_SPLIT}")
    try:
        return tuple((model, weight(share)) for model, share in found.items())
    except MisfitError as error:
        raise ValueError(f"{name}: expected {error.expected} for each model") from None


def fallbacks(found: object) -> Mapping[str, tuple[str, ...]]:
    """The models to try, in order, when no unit can serve a name."""
    if not isinstance(found, dict):
        raise MisfitError("a mapping of names, each with a list of names to fall back to")
    made: dict[str, tuple[str, ...]] = {}
    for name, others in found.items():
        listed = [others] if isinstance(others, str) else others
        if not isinstance(listed, list) or not all(isinstance(other, str) and other for other in listed):
            raise ValueError(f"{name}: expected a list of names")
        if name in listed or len(set(listed)) != len(listed):
            raise ValueError(f"{name}: expected each name once, and not {name!r} itself")
        made[str(name)] = tuple(listed)
    return made
