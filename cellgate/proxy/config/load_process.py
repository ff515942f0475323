"""Reads the configuration in another process, which ends afterwards.

Checking a configuration takes 11 MB, and for a thousand units more than a second, which a serving gate and
its streams must not pay. Problems are reported as if it were read here.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from cellgate.proxy.config.settings import Settings

ADMIN_TOKEN_VARIABLE = "CELLGATE_ADMIN_TOKEN"
_LOAD_COMMAND = (sys.executable, "-m", "cellgate.proxy.config.load")


class ConfigReader:
    """The configuration is being read; meanwhile there may be something else to do.

    Raises OSError when there is no process to read it in.
    """

    def __init__(self, path: str | None, flags: Overrides) -> None:
        pipe = subprocess.PIPE
        # In a separate process group: a Ctrl-C is for the gate.
        self._process = subprocess.Popen(_LOAD_COMMAND, stdin=pipe, stdout=pipe, process_group=0)
        self._asked = pickle.dumps((path, flags))

    def settings(self) -> Settings:
        """Waits for them. Raises ConfigError."""
        reported, _ = self._process.communicate(self._asked)
        if code := self._process.returncode:
            raise ConfigError(
                [f"the process that reads the configuration ended with exit code {code}; try again"]
            )
        found: Settings | list[str] = pickle.loads(reported)
        if isinstance(found, list):
            raise ConfigError(found)
        return found


class ConfigError(Exception):
    """The configuration cannot be used. `problems` has one line for each reason, all of them at once."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the flags say, as typed. `units` are URL or NAME=URL; given any, they replace the file's cells.

    `on_terminal`: a person reads the access log, so it is for people where neither flags nor file say how.
    """

    listen: str | None = None
    admin: str | None = None
    units: tuple[str, ...] = ()
    policy: str | None = None
    access_log: str | None = None
    redis: str | None = None
    workers: int | str | None = None
    on_terminal: bool = False

    def keys(self) -> dict[object, object]:
        """The top-level keys of the file that the flags set."""
        keys: dict[object, object] = {
            "listen": self.listen,
            "admin": self.admin,
            "cells": [{"name": "default", "units": list(self._units())}] if self.units else None,
            "policy": self.policy,
            "access_log": self.access_log,
            "redis": self.redis,
            "workers": self.workers,
        }
        return {key: value for key, value in keys.items() if value is not None}

    def defaults(self) -> dict[object, object]:
        """The top-level keys that the file may set as well."""
        return {"access_log": "console"} if self.on_terminal else {}

    def _units(self) -> Iterator[dict[str, str]]:
        """Units as the file would have them; one without a name is unit-N after its position from 1."""
        for position, text in enumerate(self.units, 1):
            name, equals, url = text.partition("=")
            if equals and "://" not in name:
                yield {"name": name, "url": url}
            else:
                yield {"name": f"unit-{position}", "url": text}


def read_settings(path: str | None, flags: Overrides) -> Settings:
    """The settings as they are now. Raises ConfigError."""
    try:
        return ConfigReader(path, flags).settings()
    except OSError as error:
        raise ConfigError(
            [f"cannot start the process that reads the configuration: {error.strerror}"]
        ) from None
