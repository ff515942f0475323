"""Checks of single values of a configuration.

Each check takes what YAML (or a flag) gave and returns what Settings wants, or raises InvalidValueError.
YAML's own surprises (a bare `off` is false, `name: 1` is a number) are met here.

In this order: `InvalidValueError`, `size`, `text`, `address`, `readable_file`, `guardrail_url`, `word`,
`check_certificates`, `quarter_of_memory`.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from cellgate.extras import ExtraName, require
from cellgate.policies import POLICIES
from cellgate.proxy.config.settings import (
    HASHED,
    KIB,
    KV_EVENTS_ENGINES,
    MIB,
    Address,
    GuardrailAnswer,
    GuardrailFail,
    LogFormat,
    OnRevoke,
    Peers,
    ShownTo,
    Tls,
)
from cellgate.router.nouns import Role, ServingRole, Transfer

_CHECKED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HOST = r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_URL = re.compile(rf"(?P<scheme>https?)://{_HOST}(:(?P<port>\d{{1,5}}))?/?", re.IGNORECASE | re.ASCII)
_CHECKED_PAGE = re.compile(r"(?P<root>[^/?#]*//[^/?#]*)(?P<target>/[!-~]*)?", re.ASCII)
_CHECKED_ADDRESS = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})", re.ASCII)
_CHECKED_SIZE = re.compile(r"(\d{1,9}) ?(KiB|MiB|GiB)", re.ASCII)
_SIZE_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": 1024 * MIB}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LARGEST = 1e12
"""No sensible number is larger; keeps infinities and overflows out."""


class InvalidValueError(ValueError):
    """A value is not what it has to be. `found` replaces a value that must not be shown as it is."""

    def __init__(self, expected: str, hint: str = "", found: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint
        self.found = found


class MisfitsError(ValueError):
    """What is wrong within one value, all of it: where in it, why, and what stands there."""

    def __init__(self, problems: Sequence[tuple[tuple[str | int, ...], ValueError, object]]) -> None:
        super().__init__("; ".join(_plain(wrong) for _, wrong, _ in problems))
        self.problems = tuple(problems)


def _plain(wrong: ValueError) -> str:
    if not isinstance(wrong, InvalidValueError):
        return str(wrong)
    hint = f"; {wrong.hint}" if wrong.hint else ""
    return f"expected {wrong.expected}, found {wrong.found}{hint}"


def each_of(expected: str, check: Callable[[object], str], found: object) -> tuple[str, ...]:
    """A list whose items are all like this. Raises MisfitsError, which names those that are not."""
    if not isinstance(found, list):
        raise InvalidValueError(expected, f"did you mean [{found}]?" if isinstance(found, str) else "")
    made, wrong = [], list[tuple[tuple[str | int, ...], ValueError, object]]()
    for index, item in enumerate(found):
        try:
            made.append(check(item))
        except InvalidValueError as error:
            wrong.append(((index,), error, item))
    if wrong:
        raise MisfitsError(wrong)
    return tuple(made)


def did_you_mean(word: object, choices: Collection[str]) -> str:
    """The hint that names the choice nearest to `word`; empty if none is near."""
    near = difflib.get_close_matches(str(word), choices, n=1)
    return f"did you mean '{near[0]}'?" if near else ""


# Numbers.


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[object], float]:
    def check(found: object) -> float:
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise InvalidValueError(expected, _number_hint(found))
        if not (abs(found) <= _LARGEST and fits(found)):
            raise InvalidValueError(expected)
        return float(found)

    return check


def _whole(expected: str, least: int) -> Callable[[object], int]:
    def check(found: object) -> int:
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _LARGEST:
            raise InvalidValueError(expected, _number_hint(found))
        return found

    return check


def _number_hint(found: object) -> str:
    """What a text that holds a number, or a time with its unit, probably means."""
    match = re.fullmatch(r"([\d.]+) ?(ms|s|m|h)?", str(found)) if isinstance(found, str) else None
    if match is None or match[1].count(".") > 1:
        return ""
    if match[2] is None:
        return "leave the quotes out"
    return f"did you mean {float(match[1]) * _SECONDS[match[2]]:g}? Times are in seconds"


seconds = _number("a number of seconds above 0", lambda number: number > 0)
seconds_or_0 = _number("a number of seconds, 0 or more", lambda number: number >= 0)
share = _number("a share from 0 to 1", lambda number: 0 <= number <= 1)
weight = _number("a weight above 0 (1 is usual)", lambda number: number > 0)
count = _whole("a whole number from 1", 1)
count_or_0 = _whole("a whole number from 0", 0)


def size(found: object) -> int:
    """Bytes, as a whole number or as '64MiB'."""
    if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= _LARGEST:
        return found
    match = _CHECKED_SIZE.fullmatch(found) if isinstance(found, str) else None
    if match and int(match[1]) > 0:
        return int(match[1]) * _SIZE_UNITS[match[2]]
    raise InvalidValueError("a size: bytes as a whole number, or a string like 64MiB", _size_hint(str(found)))


def _size_hint(text: str) -> str:
    near = re.fullmatch(r"([1-9]\d*) ?([kmg])i?b?", text, re.IGNORECASE | re.ASCII)
    return f"did you mean '{near[1]}{near[2].upper()}iB'?" if near else ""


# Words.


def text(found: object) -> str:
    """A text that is looked at only where it is used. Never shown: it may hold a password."""
    if not isinstance(found, str):
        raise InvalidValueError("a string")
    return found


def headers(found: object) -> tuple[str, ...]:
    """Names of header lines; lower case is what is compared."""
    listed = isinstance(found, list) and len(found) <= HEADERS_MOST and all(map(_is_header, found))
    if not listed:
        hint = f"did you mean [{found}]?" if _is_header(found) else ""
        raise InvalidValueError(f"a list of at most {HEADERS_MOST} header names, such as x-session-id", hint)
    return tuple(name.lower() for name in found)  # type: ignore[attr-defined]


HEADERS_MOST = 16


def _is_header(found: object) -> bool:
    return isinstance(found, str) and re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", found) is not None


def flag(found: object) -> bool:
    """True or false, as YAML has them."""
    if not isinstance(found, bool):
        raise InvalidValueError("true or false")
    return found


class OneOf:
    """The check for one of some words; `what` says of what kind they are, `meaning` more to who edits a file.
    YAML reads a bare `off` as false.
    """

    def __init__(self, what: str, words: Iterable[str], meaning: str = "") -> None:
        self._what, self._words, self._meaning = what, tuple(words), meaning

    def __call__(self, found: object) -> str:
        word = "off" if found is False and "off" in self._words else found
        if not isinstance(word, str) or word not in self._words:
            raise InvalidValueError(
                f"{self._what}: {', '.join(self._words)}", did_you_mean(found, self._words)
            )
        return word

    def kind(self) -> dict[str, Any]:
        """What it takes, as JSON Schema has it."""
        words = {"enum": [*self._words, *([False] if "off" in self._words else [])]}
        return words | ({"description": self._meaning} if self._meaning else {})


policy = OneOf("a policy", sorted(POLICIES))
node_role = OneOf("a role", [role.value for role in Role])
serving_role = OneOf("a role", get_args(ServingRole))
transfer = OneOf("a transfer", get_args(Transfer))
log_format = OneOf("a format", get_args(LogFormat), "false is how YAML reads off")
on_revoke = OneOf("what to do", get_args(OnRevoke))
kv_source = OneOf("an engine", KV_EVENTS_ENGINES)
shown_to = OneOf("who gets them", get_args(ShownTo))
guardrail_answer = OneOf("how it sees answers", get_args(GuardrailAnswer))
guardrail_fail = OneOf("what follows without a verdict", get_args(GuardrailFail))


def name(found: object) -> str:
    """A name that can stand in a URL, a label and a log line."""
    if isinstance(found, str) and _CHECKED_NAME.fullmatch(found):
        return found
    hint = "" if isinstance(found, (str, list, dict)) or found is None else "put it in quotes"
    raise InvalidValueError("a name of at most 128 letters, digits, '.', '_' and '-'", hint)


def models(found: object) -> tuple[str, ...]:
    """The names of models, none twice."""
    named = each_of("a list of model names", _filled("the name of a model"), found)
    if len(set(named)) != len(named):
        raise ValueError(f"duplicate model in {', '.join(map(repr, named))}")
    return named


def _filled(expected: str) -> Callable[[object], str]:
    """The check for a text of any kind that is not empty."""

    def check(found: object) -> str:
        if isinstance(found, str) and found:
            return found
        is_bare = isinstance(found, (int, float))
        raise InvalidValueError(expected, "put it in quotes" if is_bare else "")

    return check


def place(found: object) -> tuple[str, ...]:
    """Where a node stands: the names of layers, from the widest to the narrowest."""
    expected = "a list of layers from the widest to the narrowest, such as [zone-a, spine-3, leaf-12]"
    if found == []:
        raise InvalidValueError(expected)
    return each_of(expected, _filled("the name of a layer"), found)


# Places.


def _is_host(host: str) -> bool:
    """Whether a host that looks like an IP address is one; names are the resolver's business."""
    if not host.startswith("[") and not re.fullmatch(r"[\d.]+", host):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host.strip("[]")))
    return False


def address(found: object) -> Address:
    """HOST:PORT to listen on, port 0 to let the system choose."""
    match = _CHECKED_ADDRESS.fullmatch(found) if isinstance(found, str) else None
    if match and _is_host(match["host"]) and int(match["port"]) < 65536:
        return Address(match["host"].strip("[]"), int(match["port"]))
    port = re.fullmatch(r":?(\d{1,5})", str(found), re.ASCII)
    hint = f"did you mean '127.0.0.1:{port[1]}'?" if port and int(port[1]) < 65536 else ""
    raise InvalidValueError("HOST:PORT, with an IPv6 host in brackets", hint)


def port(found: object) -> int:
    if type(found) is int and 0 < found < 65536:
        return found
    raise InvalidValueError("a port from 1 to 65535")


def redis_prefix(found: object) -> str:
    """What keys begin with; what means something in a pattern of Redis' access control stays out."""
    if isinstance(found, str) and re.fullmatch(r"[A-Za-z0-9._:/-]{1,64}", found):
        return found
    raise InvalidValueError("a prefix of at most 64 letters, digits, '.', '_', ':', '/' and '-'")


def networks(found: object) -> tuple[str, ...]:
    """Networks, each like 10.0.0.0/8 or a single address."""
    return each_of("a list of networks like 10.0.0.0/8", _network, found)


def _network(found: object) -> str:
    expected, hint = "a network like 10.0.0.0/8, or an address", ""
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            Peers([found])
            return found
        with contextlib.suppress(ValueError):
            hint = f"did you mean {ipaddress.ip_network(found, strict=False)}?"
    raise InvalidValueError(expected, hint)


def target(found: object) -> str:
    """HOST:PORT to connect to."""
    listening = address(found)
    if listening.port == 0:
        raise InvalidValueError("HOST:PORT with a port from 1 to 65535")
    return str(listening)


def page(found: object) -> str:
    """A page of a server: its root and a path, which may have a query."""
    expected = "http://HOST:PORT/PATH or https://HOST:PORT/PATH"
    if not isinstance(found, str):
        raise InvalidValueError(expected)
    if "@" in found.partition("?")[0]:
        raise InvalidValueError(expected, found="a URL with '@' (not shown, it may hold a password)")
    match = _CHECKED_PAGE.fullmatch(found)
    root = _root(match["root"]) if match else None
    if match is None or root is None:
        raise InvalidValueError(expected)
    if match["target"] is None:
        raise InvalidValueError(expected, f"add the path, such as '{root}/health' or '{root}/metrics'")
    return root + match["target"]


def otlp_traces(found: object) -> str:
    """Where a collector takes spans by OTLP over HTTP."""
    return _otlp(found, "/v1/traces")


def otlp_metrics(found: object) -> str:
    """Where a collector takes metrics by OTLP over HTTP."""
    return _otlp(found, "/v1/metrics")


def _otlp(found: object, path: str) -> str:
    if isinstance(found, str) and (root := _root(found)):
        expected = "http://HOST:PORT/PATH or https://HOST:PORT/PATH of a collector"
        raise InvalidValueError(expected, f"did you mean '{root}{path}'?")
    return page(found)


def url(found: object) -> str:
    """The root of a unit's API, without a trailing slash."""
    expected = "http://HOST:PORT or https://HOST:PORT without a path"
    if not isinstance(found, str):
        raise InvalidValueError(expected)
    if "@" in found:
        raise InvalidValueError(expected, found="a URL with '@' (not shown, it may hold a password)")
    root = _root(found)
    if root is None:
        raise InvalidValueError(expected, _url_hint(found))
    return root


def zmq_endpoint(found: object) -> str:
    """Where an engine has bound a socket of ZeroMQ."""
    host_port = found.removeprefix("tcp://") if isinstance(found, str) else ""
    if not isinstance(found, str) or host_port == found:
        raise InvalidValueError("tcp://HOST:PORT")
    return f"tcp://{target(host_port)}"


def _root(text: str) -> str | None:
    """The URL as the gate keeps it, or None if it is more or less than a root."""
    match = _URL.fullmatch(text)
    if match is None or not _is_host(match["host"]) or not 0 < int(match["port"] or 80) < 65536:
        return None
    port = f":{match['port']}" if match["port"] else ""
    return f"{match['scheme'].lower()}://{match['host'].lower()}{port}"


def _url_hint(text: str) -> str:
    """What `text` probably means: the same with a scheme, and without a path such as /v1 or a query."""
    scheme, _, rest = (text if "://" in text else f"http://{text}").partition("://")
    authority = re.split("[/?#]", rest)[0]
    meant = _root(f"{scheme}://{authority}")
    if meant is None:
        return ""
    return f"did you mean '{meant}'?" + (" Requests bring their own path" if authority != rest else "")


# Files.


def readable_file(found: object) -> str:
    """The name of a file that can be opened now."""
    if not isinstance(found, str):
        raise InvalidValueError("a file name")
    try:
        Path(found).open("rb").close()
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            "a readable file", found=f"{found!r}: {getattr(error, 'strerror', error)}"
        ) from None
    return found


def token(text: str) -> str:
    """A token or API key: what can stand in an Authorization header. It is never shown."""
    if not re.fullmatch(r"[!-~]+", text.strip()):
        raise InvalidValueError(
            "a token of visible ASCII characters", found="none" if not text.strip() else "other characters"
        )
    return text.strip()


def admin_token(text: str) -> str:
    """A token, or the hash of one."""
    found = token(text)
    if found.startswith(HASHED) and not re.fullmatch(r"[0-9a-f]{64}", found.removeprefix(HASHED)):
        raise InvalidValueError(f"64 hexadecimal digits after {HASHED}", found="something else")
    return found


def admin_token_file(found: object) -> str:
    """The same, that a file holds."""
    return admin_token(token_in_file(found))


def token_in_file(found: object) -> str:
    """The token or API key that a file holds."""
    return token(Path(readable_file(found)).read_text(encoding="latin-1"))


@contextlib.contextmanager
def pem_errors(expected: str) -> Iterator[None]:
    """Turns what OpenSSL says of certificate files into InvalidValueError."""
    try:
        yield
    except ssl.SSLError as error:
        raise InvalidValueError(
            expected, found=f"a file that OpenSSL refuses ({error.reason or 'not PEM, or encrypted'})"
        ) from None
    except OSError as error:
        raise InvalidValueError(expected, found=str(error)) from None


# Checks of values about what is let in and shown: guardrail, pages of other sites, header lines.


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+", re.ASCII)


def guardrail_url(found: object) -> str:
    """Where a guardrail is asked: a page, or a Unix socket."""
    if isinstance(found, str) and found.startswith("unix:"):
        if not re.fullmatch(r"unix:///[!-~]+", found, re.ASCII):
            raise InvalidValueError("unix:///PATH of a socket")
        return found
    return page(found)


def origins(found: object) -> tuple[str, ...]:
    """Origins of pages (RFC 6454), or `*` alone."""
    expected = 'a list of origins like https://app.example.com, without a path, or ["*"]'
    if found == []:
        raise InvalidValueError(expected)
    return each_of(expected, _origin, found)


def _origin(found: object) -> str:
    if isinstance(found, str) and (found == "*" or _ORIGIN.fullmatch(found)):
        return found
    near = re.match(_ORIGIN, found) if isinstance(found, str) else None
    raise InvalidValueError("an origin without a path, or *", f"did you mean {near[0]}?" if near else "")


# Checks of names that other systems give: of a namespace, a cluster, a service.


def word(expected: str) -> Callable[[object], str]:
    """The check for a word without spaces."""

    def check(found: object) -> str:
        if isinstance(found, str) and re.fullmatch(r"[!-~]{1,255}", found):
            return found
        raise InvalidValueError(expected)

    return check


def words(expected: str) -> Callable[[object], tuple[str, ...]]:
    """The check for a list of words."""

    def check(found: object) -> tuple[str, ...]:
        if found == []:
            raise InvalidValueError(expected)
        return each_of(expected, _filled("a word"), found)

    return check


# Whether certificate files can be used: at start, and whenever they have changed.


PAIRS = (("cert", "key"), ("unit_cert", "unit_key"), ("admin_cert", "admin_key"))
"""Keys of `tls` that belong together: a certificate and its key."""
AUTHORITIES = ("ca", "admin_client_ca")
"""Keys of `tls` that name certificates of authorities."""


def with_extra(name: ExtraName, *without: object) -> Callable[[Any], Any]:
    """What asks for an extra, unless it is off, or what a gate `without` the extra has."""

    def check(found: Any) -> Any:
        if found and found not in without:
            require(name)
        return found

    return check


def check_certificates(tls: Tls) -> None:
    """A certificate comes with its key, and authorities can be read. Raises MisfitsError with all of it."""
    wrong = list[ValueError]()
    for one, other in PAIRS:
        try:
            _check_pair(tls, one, other)
        except ValueError as error:
            wrong.append(error)
    for name in AUTHORITIES:
        if (file := getattr(tls, name)) is not None:
            try:
                with pem_errors(f"CA certificates in {name}, in PEM format"):
                    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
            except ValueError as error:
                wrong.append(error)
    if tls.admin_client_ca is not None and tls.admin_cert is None:
        needed = "admin_client_ca needs admin_cert and admin_key: without them the port has no TLS"
        wrong.append(ValueError(needed))
    if wrong:
        raise MisfitsError([((), error, None) for error in wrong])


def _check_pair(tls: Tls, one: str, other: str) -> None:
    cert, key = getattr(tls, one), getattr(tls, other)
    if (cert is None) != (key is None):
        missing = one if cert is None else other
        raise ValueError(f"{one} and {other} must be given together: {missing} is missing")
    if cert is None:
        return
    try:
        with pem_errors(f"a certificate in {one} and its key in {other}, in PEM format"):
            # Without a password OpenSSL would ask the terminal for that of an encrypted key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except InvalidValueError as error:
        if _holds_key(cert) and not _holds_key(key):
            error.hint = f"{one} names a key and {other} a certificate: swap them"
        elif "KEY_VALUES_MISMATCH" in error.found:
            error.hint = f"{other} is not the key of this certificate"
        raise


def _holds_key(path: str) -> bool:
    """Whether a file has a key, and no certificate."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(4 * MIB)
    except OSError:
        return False
    return b"PRIVATE KEY-----" in text and b"BEGIN CERTIFICATE-----" not in text


def files_of(tls: Tls) -> tuple[str, ...]:
    names = (*(name for pair in PAIRS for name in pair), *AUTHORITIES)
    return tuple(file for name in names if (file := getattr(tls, name)) is not None)


def quarter_of_memory() -> int:
    """A quarter of the machine's memory, or of the control group's limit if that is smaller, in bytes."""
    machine = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([machine, *cgroup_limits(Path("/"))]) // 4


def cgroup_limits(root: Path) -> Iterator[int]:
    """The limits in bytes set on our control group and on those it is in (cgroups(7), version 2 and 1)."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mount, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = Path(group.lstrip("/"))
        for level in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # Absent at the root; "max" where none is set.
                yield int((mount / level / limit).read_text())


def log_file(found: object) -> str:
    """The name of a file that can be appended to, or made."""
    if not isinstance(found, str) or not found:
        raise InvalidValueError("a file name")
    path = Path(found)
    is_other = path.exists() and not path.is_file()
    if is_other or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidValueError("a writable file in an existing directory", found=repr(found))
    return found
