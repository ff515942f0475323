"""Objects of an API server but pods: created, read, replaced by their version, merged. For tests and drills.

Answers are those of a real server ("Kubernetes API Concepts"): a Status with a code, a reason and a message.
"""

import itertools
from typing import Any, NamedTuple

import aiohttp.web
import orjson

Json = dict[str, Any]

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_CONFLICT = (
    'Operation cannot be fulfilled on {what.resource}.{what.group} "{what.name}": the object has been '
    "modified; please apply your changes to the latest version and try again"
)


class Asked(NamedTuple):
    """What a request is about, as a rule of a Role says it."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str


def asked(request: aiohttp.web.Request) -> Asked:
    """The same of a request, by its path."""
    root, *parts = request.path.strip("/").split("/")
    group = parts.pop(0) if root == "apis" else ""
    parts.pop(0)
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name, sub = [*parts, "", ""][:3]
    read = "watch" if "watch" in request.query else "get" if name else "list"
    verb = _VERBS.get(request.method, read)
    return Asked(verb, group, f"{plural}/{sub}" if sub else plural, namespace, name)


def refusal(code: int, reason: str, message: str, **details: object) -> aiohttp.web.Response:
    """A Status."""
    told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return aiohttp.web.json_response(told | {"message": message, "details": details}, status=code)


def forbidden(what: Asked) -> aiohttp.web.Response:
    """What an account gets that lacks a right."""
    who = "system:serviceaccount:prod:cellgate"
    where = f' in the namespace "{what.namespace}"' if what.namespace else " at the cluster scope"
    message = f'User "{who}" cannot {what.verb} resource "{what.resource}" in API group "{what.group}"{where}'
    return refusal(403, "Forbidden", f'{what.resource} "{what.name}" is forbidden: {message}')


class FakeObjects:
    """All objects, by kind, namespace and name."""

    def __init__(self) -> None:
        self._stored: dict[tuple[str, str, str], Json] = {}
        self._versions = itertools.count(1)

    def put(self, resource: str, namespace: str, thing: Json) -> Json:
        """An object is there."""
        name = thing["metadata"]["name"]
        version = {"resourceVersion": str(next(self._versions))}
        stored: Json = {**thing, "metadata": {"uid": f"uid-{name}", **thing["metadata"], **version}}
        self._stored[resource, namespace, name] = stored
        return stored

    def all(self, resource: str) -> list[Json]:
        """Those of a kind, in order."""
        return [thing for key, thing in self._stored.items() if key[0] == resource]

    async def answer(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        """The answer to a request about any of them."""
        what = asked(request)
        body: Json = orjson.loads(text) if (text := await request.read()) else {}
        if what.verb == "create":
            return self._create(what, body)
        known = self._stored.get((what.resource, what.namespace, what.name))
        if known is None:
            return refusal(404, "NotFound", f'{what.resource} "{what.name}" not found')
        if what.verb == "update":
            version = body["metadata"].get("resourceVersion")
            if version not in (None, known["metadata"]["resourceVersion"]):
                return refusal(409, "Conflict", _CONFLICT.format(what=what))
            known = self.put(what.resource, what.namespace, body)
        if what.verb == "patch":
            known = self.put(what.resource, what.namespace, merged(known, body))
        return aiohttp.web.json_response(known)

    def _create(self, what: Asked, body: Json) -> aiohttp.web.Response:
        meta = body["metadata"]
        name = meta.setdefault("name", f"{meta.get('generateName', '')}{next(self._versions)}")
        if (what.resource, what.namespace, name) in self._stored:
            return refusal(409, "AlreadyExists", f'{what.resource} "{name}" already exists')
        return aiohttp.web.json_response(self.put(what.resource, what.namespace, body), status=201)


def merged(thing: Any, change: Any) -> Any:
    """A JSON merge patch (RFC 7396)."""
    if not isinstance(change, dict):
        return change
    base = thing if isinstance(thing, dict) else {}
    both = {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in both.items() if value is not None}
