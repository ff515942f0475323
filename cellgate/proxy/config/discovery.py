"""What may stand under `discover` of a cell: the name of a source, its keys, and those of all its units."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from pydantic import Field, PlainValidator, create_model

from cellgate.proxy.config import probing, values
from cellgate.proxy.config.sources import PACKAGES, SOURCES, Source
from cellgate.proxy.config.units import Keys
from cellgate.proxy.config.values import choice
from cellgate.proxy.config.word_values import word, words
from cellgate.router.nouns import Unit
from cellgate.router.split_nouns import ServingRole

_LIKE = Unit(name="", cell="", url="")


class LikeKeys(Keys):
    """What all units of a source have in common: keys of a unit, under `unit`."""

    weight: Annotated[float, PlainValidator(values.weight)] = _LIKE.weight
    max_in_flight: Annotated[int, PlainValidator(values.count)] = _LIKE.max_in_flight
    models: Annotated[tuple[str, ...], PlainValidator(values.models)] = _LIKE.models
    engine: Annotated[str, PlainValidator(probing.engine)] = _LIKE.engine
    canary: Annotated[str, PlainValidator(probing.canary)] = _LIKE.canary
    role: Annotated[ServingRole, PlainValidator(values.serving_role)] = _LIKE.role
    bootstrap_port: Annotated[int, PlainValidator(values.port)] = _LIKE.bootstrap_port
    api_key_file: Annotated[str | None, PlainValidator(values.token_in_file)] = Field(None, repr=False)


def source(found: object) -> str:
    return choice("a source", found, sorted(SOURCES))


def record(found: object) -> str:
    return choice("a record type", found, ["A", "AAAA", "SRV"])


def scheme(found: object) -> str:
    return choice("a scheme", found, ["http", "https"])


def _given(kind: Any) -> Any:
    return Annotated[Any, PlainValidator(kind)]


_CHECKS: dict[str, Any] = {
    "host": word("the name to resolve"),
    "record": record,
    "server": values.target,
    "path": word("a file name"),
    "name": word("the name of a LeaderWorkerSet"),
    "namespace": word("the name of a namespace"),
    "kubeconfig": values.readable_file,
    "places": values.flag,
    "cluster": word("the name or ARN of a cluster"),
    "services": words("a list of service names"),
    "region": word("the name of a region"),
    "port": values.port,
    "agent_port": values.port,
    "scheme": scheme,
    "period_s": values.seconds,
}


def _default(key: str) -> object:
    """What the sources that have this key take for it, where they agree; only shown."""
    given = {f.default for kind in SOURCES.values() for f in dataclasses.fields(kind) if f.name == key}
    return given.pop() if len(given) == 1 and MISSING not in given else None


_fields: dict[str, Any] = {"from": (_given(source), ...)}
_fields |= {key: (_given(check), _default(key)) for key, check in _CHECKS.items()}
_fields["unit"] = (LikeKeys, None)
DiscoverKeys = create_model("DiscoverKeys", __base__=Keys, **_fields)


@dataclass(frozen=True, slots=True)
class Discover:
    """A source whose cell is not set yet."""

    kind: str
    fields: Mapping[str, object]
    like: LikeKeys

    def source(self, cell: str, api_key: str) -> Source:
        """The source of this cell; `api_key` is what probes send where the file names none."""
        common = {key: value for key, value in self.like if key != "api_key_file"}
        like = Unit(name="", cell=cell, url="", api_key=self.like.api_key_file or api_key, **common)
        return SOURCES[self.kind](like, **self.fields)  # type: ignore[arg-type]


def discovered_by(found: object) -> Discover:
    """Reads the mapping under `discover`."""
    keys = DiscoverKeys.model_validate(found)
    given = {key: value for key, value in keys if key in keys.model_fields_set}
    name, like = given.pop("from"), given.pop("unit", LikeKeys.model_validate({}))
    fields = {f.name: f.default for f in dataclasses.fields(SOURCES[name]) if f.name != "like"}
    # Units of a file have all their keys there.
    known = ", ".join(fields if name == "file" else [*fields, "unit"])
    if strange := [key for key in keys.model_fields_set if key not in known.split(", ") and key != "from"]:
        raise ValueError(f"from: {name} does not take {', '.join(strange)}; it takes {known}")
    if missing := [key for key, default in fields.items() if default is MISSING and key not in given]:
        raise ValueError(f"from: {name} requires {' and '.join(missing)}")
    if name == "dns" and ("port" in given) == (given.get("record") == "SRV"):
        raise ValueError(
            "record: SRV does not take port: each record has its own"
            if "port" in given
            else "from: dns requires port, except with record: SRV"
        )
    package, extra = PACKAGES.get(name, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"from: {name} requires a package that is not installed: pip install 'cellgate[{extra}]'"
        )
    return Discover(name, given, like)
