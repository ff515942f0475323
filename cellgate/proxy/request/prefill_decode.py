"""The leg of a split request to the unit that computes its prompt. The decoder's lease waits meanwhile; where
the two meet (SGLang), the decoder has the request at the same time.

1. A decoder that can compute the prompt itself does so whatever becomes of the leg, which then never fails a
   request. One that cannot would wait for a prefiller that is gone for minutes: it is left at once.
2. The prefiller's lease is released exactly once, before its owner learns of the end.
3. Blocks that were computed and that no decoder is known to have fetched are unclaimed (UnclaimedBlocks).

In this order: `PrefillLeg`, `PromptLeg`, `Rendezvous`, `may_have_some`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from cellgate.proxy.http.call import Call
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.sse import is_error, message_of
from cellgate.proxy.observe.defects import guarded
from cellgate.proxy.request.body_shape import NAMES as OF_THE_PROMPT
from cellgate.proxy.request.ports import PickRequest
from cellgate.proxy.request.response import failure_of, outcome_of
from cellgate.proxy.request.unit_head import rank_line
from cellgate.router.nouns import (
    BUSY_STATUSES,
    LEG_LOST,
    LINK_FAILED,
    PREFILLED,
    Ask,
    Outcome,
    SplitPlan,
    SplitStep,
    Unit,
)
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.life import RequestLife
    from cellgate.proxy.request.ports import Pending
    from cellgate.proxy.request.services import Services
    from cellgate.proxy.request.unclaimed_blocks import HeadFor


PREFILL_REPLY_BYTES = 4 << 20
"""The largest answer to leg 1: ids of the blocks of a prompt of a million tokens."""
_WAIT_S = 1.0
"""A prefiller that was free a moment ago and gives no lease for this long is not waited for, unless it has to
be: then as long as the queue allows.
"""


class PrefillLeg:
    """One leg. `decoder` is the lease that waits; `handoff` is set once the prompt is computed.

    `settled`: no blocks are left to be freed, or that is under way; `sent_at` is when the decoder got its
    request (0: not yet), and `target` the path that it was sent to.

    `prefilled` is called once after `begin`, unless the leg is dropped: it is the decoder's turn; None: the
    prompt was not computed. Where a decoder that cannot compute it has no pair any more, its owner fails.
    """

    __slots__ = (
        "_begun_at",
        "_call",
        "_gate",
        "_head",
        "_lease",
        "_life",
        "_pending",
        "_prefilled",
        "_prompt",
        "decoder",
        "handoff",
        "sent_at",
        "settled",
        "split",
        "target",
    )

    def __init__(
        self,
        life: RequestLife,
        prefilled: Callable[[Handoff | Rendezvous | None], None],
        gate: Services,
        decoder: Lease,
        split: SplitPlan,
        prompt: PromptLeg | Rendezvous,
        head: HeadFor,
    ) -> None:
        self._life, self._prefilled = life, prefilled
        self._gate = gate
        self._prompt = prompt
        self._head = head
        self._pending: Pending | None = None
        self._lease: Lease | None = None
        self._call: Call | None = None
        self._begun_at = gate.now()
        self.split = split
        self.decoder = decoder
        self.handoff: Handoff | None = None
        self.settled = False
        self.sent_at = 0.0
        self.target = b""

    def begin(self, ask: Ask) -> None:
        """Get a lease on the prefiller for the prompt of `ask`, and send it there."""
        ask = ask._replace(stream=True, max_tokens=1, splits=False, unit=None, build=None, continuable=0)
        wanted = PickRequest(ask, len(self._prompt.body), has_failure=True, units=(self.split.prefiller,))
        found = self._gate.dispatcher.acquire(wanted, self)
        if isinstance(found, Lease | Failure):
            self.on_result(found)
        else:
            self._pending = found

    def on_result(self, found: Lease | Failure) -> None:
        self._pending = None
        if isinstance(found, Failure):
            self._drop(f"unit {self.split.prefiller} has no room, or is not in rotation")
            return
        self._lease = lease = found
        lease.on_evict = self._evicted
        pool, prompt, body = self._gate.pool(lease.unit_state), self._prompt, self._prompt.body
        # A room leads to a rank by itself.
        is_free = lease.rank < 0 or self.split.together
        lines = pool.lines if is_free else pool.lines + rank_line(lease.rank)
        self._call = Call(self, pool, self._head(lines, len(body)), body, max_bytes=PREFILL_REPLY_BYTES)
        # A kept connection may be stale, and would need a second try.
        self._call.begin(fresh=True)
        if isinstance(prompt, Rendezvous) and self._lease is lease:
            self._prefilled(prompt)

    def crashed(self, error: Exception) -> None:
        self._life.crashed(error)

    def tick(self, now: float) -> None:
        waited_s = now - self._begun_at
        if self._pending is not None and self._is_in_vain(waited_s):
            self.drop()
            self._drop(f"unit {self.split.prefiller} gave no lease within {waited_s:.1f} s")
        elif self._lease is not None and waited_s > self._gate.settings.timeouts.answer_s:
            reason = f"unit {self._lease.unit} did not compute a prompt within {waited_s:.0f} s"
            self.failed(Failure(FailureKind.ANSWER_TIMEOUT, reason))

    def _is_in_vain(self, waited_s: float) -> bool:
        """Whether a lease is not waited for any longer."""
        if not self.split.together:
            return waited_s > _WAIT_S
        state = self._gate.board.units.get(self.split.prefiller)
        return state is None or not state.is_usable()

    def drop(self) -> None:
        """The request is over, or goes on without it: stop, and free the blocks."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._lease is not None:
            self._release(Outcome.CLIENT_LEFT)
        if self.handoff is not None and not self.settled:
            self.settled = True
            pair = self.split.prefiller, self.decoder.unit
            self._gate.unclaimed.adopt(pair, self.split.tokens, self.handoff.releasing(), self._head)

    def settle(self) -> None:
        """The decoder has the blocks."""
        self.settled = True
        if self._lease is not None:
            # It has not said so yet.
            self._commit(self._lease)
            self._release(Outcome.OK)

    # -- the prefiller's answer ----------------------------------------------------------------------------

    def answered(self, status: int, body: bytes) -> None:
        guarded(self._life, self._take, status, body)

    def failed(self, failure: Failure) -> None:
        guarded(self._life, self._fail, failure)

    def _take(self, status: int, body: bytes) -> None:
        lease, call, gate = self._lease, self._call, self._gate
        assert lease is not None
        assert call is not None
        assert call.reply_head is not None
        if isinstance(self._prompt, Rendezvous):
            self._met(lease, status, body)
            return
        if status >= 400:
            failure = failure_of(call.reply_head, lease.unit_state, gate.now())
            if failure is not None and failure.kind is not FailureKind.BUSY:
                self._fail(failure)
                return
            self._release(outcome_of(status))
            self._drop(f"unit {self.split.prefiller} answered {status} to a prompt")
            return
        handoff = self._prompt.handoff(body)
        self._commit(lease)
        self._release(Outcome.OK)
        if isinstance(handoff, str):
            gate.reports.send(self._step(LINK_FAILED, reason=handoff))
            self._prefilled(None)
            return
        self.handoff = handoff
        gate.reports.send(self._step(PREFILLED, seconds=gate.now() - self._begun_at))
        self._prefilled(handoff)

    def _met(self, lease: Lease, status: int, body: bytes) -> None:
        """The prefiller answers once the blocks have gone over, or could not."""
        unit = self.split.prefiller
        if status in BUSY_STATUSES:
            self._release(Outcome.BUSY)
            self._drop(f"unit {unit} answered {status} to a prompt")
        elif status >= 500 or is_error(body):
            # The failure of either side, or of the way between them.
            said = f"answered {status}" if status >= 500 else f"reported {message_of(body)}"
            self._release(Outcome.EVICTED)
            self._life.failed(Failure(FailureKind.TRANSFER_FAILED, f"unit {unit} {said}"))
        elif status >= 400:
            # The decoder answers the same to the client.
            self._release(outcome_of(status))
            self._gate.reports.send(self._step(LEG_LOST, reason=f"unit {unit} answered {status} to a prompt"))
        else:
            self._commit(lease)
            self._release(Outcome.OK)
            self._gate.reports.send(self._step(PREFILLED, seconds=self._gate.now() - self._begun_at))
            # From here on the silence of the decoder means something.
            self.decoder.paused = False
            self.decoder.unit_state.work_at = self._gate.now()

    def _commit(self, lease: Lease) -> None:
        """Its prompt is computed: its prefill rate is learnt as from the first token of a stream."""
        now = self._gate.now()
        lease.commit(now)
        lease.unit_state.progress_at = max(lease.unit_state.progress_at, now)
        self._gate.dispatcher.committed(lease, resumed=True)

    def _fail(self, failure: Failure) -> None:
        lease = self._lease
        assert lease is not None
        self._release(failure.kind.row.outcome)
        self._gate.dispatcher.blame(lease, failure, 0, 0)
        self._drop(failure.message)

    def _evicted(self) -> None:
        guarded(self._life, self._fail, Failure(FailureKind.EVICTED, "it went down, or was paused"))

    def _release(self, outcome: Outcome) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        if self._call is not None:
            self._call.abandon()
        self._gate.dispatcher.released(lease, outcome)

    def _drop(self, reason: str) -> None:
        self._gate.reports.send(self._step(LEG_LOST, reason=reason))
        if self.split.together:
            self._life.failed(Failure(FailureKind.PREFILL_LOST, reason))
        else:
            self._prefilled(None)

    def _step(self, kind: str, *, seconds: float = 0.0, reason: str = "") -> SplitStep:
        return SplitStep(kind, self.split.prefiller, self.decoder.unit, self.split.tokens, seconds, reason)


# The bodies of a split request, as vLLM's NixlConnector takes them. Pure.
#
# Wire format: `kv_transfer_params`, vLLM 0.32 and 0.33 (toy_proxy_server.py of its tests of the connector).
# Leg 1 asks the prefiller for one token; its answer has the parameters with which the decoder fetches the
# blocks. An engine does not check that these belong to the prompt that it gets with them: with those of
# another request it answers from that one's blocks. So parameters exist only inside a Handoff, which is made
# of one request and the answer to it, and gives the decoder's body once.


_REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NO_PART_OF_THE_PROMPT = frozenset(
    (
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "response_format",
        "structured_outputs",
        "return_token_ids",
    )
)
"""Fields that leg 1 goes without: a first token that ended the answer would leave no blocks to fetch."""
_PREFILL_ONLY_AS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
}
"""Fields with other values need more of the engine that answers than one prompt's blocks."""
_NO_TRANSFER = b',"kv_transfer_params":null}'


class PromptLeg:
    """Leg 1 of one request: `body` is what the prefiller gets."""

    __slots__ = ("_document", "_request_id", "body")

    def __init__(self, document: dict[str, Any], request_id: str) -> None:
        self._document = document
        self._request_id = request_id
        self.body = orjson.dumps(_one_token(document) | {"kv_transfer_params": _REMOTE_DECODE})

    @classmethod
    def of(cls, body: bytes, request_id: str) -> PromptLeg | str:
        """The leg of a request with this JSON object, or why it cannot be split."""
        document: dict[str, Any] = orjson.loads(body)
        reason = _why_unfit(document)
        return reason or cls(document, request_id)

    def handoff(self, reply: bytes) -> Handoff | str:
        """What the prefiller's answer hands over, or what is wrong with it."""
        try:
            answer = orjson.loads(reply)
        except orjson.JSONDecodeError:
            return "its answer is not JSON"
        given = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if not isinstance(given, dict) or not given.get("do_remote_prefill"):
            return "its answer has no kv_transfer_params: its engine may have no KV connector"
        of = given.get("remote_request_id")
        if isinstance(of, str) and self._request_id not in of:
            return "its answer has the kv_transfer_params of another request"
        return Handoff(self._document, given)


class Handoff:
    """Blocks that a prefiller holds for one request."""

    __slots__ = ("_document", "_parameters", "is_spent")

    def __init__(self, document: dict[str, Any], parameters: dict[str, Any]) -> None:
        self._document = document
        self._parameters = parameters
        self.is_spent = False

    def spend(self) -> bytes:
        """The decoder's body. Once fetched, blocks may be another's. Raises RuntimeError the second time."""
        if self.is_spent:
            raise RuntimeError("the blocks of a request were handed over twice")
        self.is_spent = True
        return orjson.dumps(self._document | {"kv_transfer_params": self._parameters})

    def releasing(self) -> bytes:
        """The body with which a decoder fetches blocks, to free the prefiller; its answer has no use."""
        return orjson.dumps(_one_token(self._document) | {"kv_transfer_params": self._parameters})


def without_kv_params(body: bytes) -> bytes:
    """The JSON object without its client's transfer parameters: of a name used twice, the last counts."""
    bare = body.rstrip()
    return bare if bare[:-1].rstrip().endswith(b"{") else bare[:-1] + _NO_TRANSFER


def _one_token(document: dict[str, Any]) -> dict[str, Any]:
    asked = {name: value for name, value in document.items() if name not in _NO_PART_OF_THE_PROMPT}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked | {"stream": False, "max_tokens": 1, "ignore_eos": True}


def _why_unfit(document: dict[str, Any]) -> str:
    for name, harmless in _PREFILL_ONLY_AS.items():
        value = document.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in harmless):
            return f"the request has {name}"
    prompt = document.get("prompt", "")
    if isinstance(prompt, list) and not all(type(each) is int for each in prompt):
        return "the request has several prompts"
    return ""


# The bodies of a split request, as SGLang's engines take them. Pure.
#
# Wire format: `bootstrap_host`, `bootstrap_port` and `bootstrap_room` in any request for generation, SGLang
# 0.4 to 0.5.23 (its PD disaggregation). Both engines get the same request at the same time. They meet in the
# room, at the prefiller's bootstrap server; the blocks and the first token go from there to the decoder,
# which answers. Engines do not check whose blocks come to a room, so that a room is for one attempt of one
# request: it exists only inside a Rendezvous, which is made with a new one each time.


_ROOM_BITS = 62
"""Rooms have 63 bits. A request for several answers takes as many rooms in a row."""
_NO_BOOTSTRAP: Mapping[str, str | int | None] = {
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "disagg_prefill_dp_rank": None,
}
_OF_PAIRS = (b"x-override-", b"x-data-parallel-rank:")
"""Header lines with which a client could choose a room, or a rank that the room does not lead to."""


class Rendezvous:
    """Where the two engines of one attempt meet. `body` is what the prefiller gets."""

    __slots__ = ("body", "is_spent")

    def __init__(self, body: bytes, prefiller: Unit, rng: Random) -> None:
        # Room 0 is that of probes.
        place: Mapping[str, str | int | None] = {
            "bootstrap_host": urlsplit(prefiller.url).hostname,
            "bootstrap_port": prefiller.bootstrap_port,
            "bootstrap_room": 1 + rng.getrandbits(_ROOM_BITS),
        }
        self.body = with_fields(body, {**_NO_BOOTSTRAP, **place})
        self.is_spent = False

    def spend(self) -> bytes:
        """The decoder's body. Raises RuntimeError the second time: nobody comes to the room again."""
        if self.is_spent:
            raise RuntimeError("a room was used twice")
        self.is_spent = True
        return self.body


def without_bootstrap(body: bytes) -> bytes:
    """The JSON object without a room of its client."""
    return with_fields(body, _NO_BOOTSTRAP)


def own_lines(lines: list[bytes]) -> list[bytes]:
    """The header lines of a client, without those that belong to pairs."""
    return [line for line in lines if not line.startswith(_OF_PAIRS)]


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """The JSON object with these fields: of two with one name, engines take the last."""
    bare = body.rstrip()[:-1].rstrip()
    comma = b"" if bare.endswith(b"{") else b","
    return bare + comma + orjson.dumps(fields)[1:]


# What a body says of a transfer of KV blocks, and only the gate may say to a decoder. Pure.
#
# Engines read it at the top of a body, in `sampling_params.extra_args` (vLLM's `/inference/v1/generate`), in
# `vllm_xargs`, and in parameters that are JSON in a string (Triton's backends). So it is taken out wherever
# it stands beside the prompt: by its name, and by what is in it, because the blocks of another request are as
# good to an engine under any name that it reads.


_PREFILL_NAMES = re.compile(r"(?:kv|ec)_transfer_params|disaggregated_params|bootstrap_(?:host|port|room)")
_SHAPE = frozenset(
    (
        *("do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_host"),
        *("remote_port", "remote_request_id", "bootstrap_host", "bootstrap_room", "ctx_request_id"),
    )
)
"""Fields of the parameters of vLLM's connectors, SGLang's and TensorRT-LLM's."""
_PREFILL_MARKS = (b"_transfer_params", b"remote_", b"bootstrap_", b"disaggregated_params", b"ctx_request_id")
_ESCAPED = re.compile(rb"(?<!\\)(?:\\\\)*\\u00[4-7]")
"""A letter of a name that is written as an escape. No encoder of JSON does that."""
_DEPTH = 16


def may_have_some(body: bytes) -> bool:
    """Whether a body may have such a field somewhere, known without parsing it."""
    return any(mark in body for mark in _PREFILL_MARKS) or (
        b"\\u00" in body and _ESCAPED.search(body) is not None
    )


def named_in(body: bytes) -> bool:
    """Whether a body too large to be parsed here has such a key: within texts a quote is escaped."""
    quoted = any(b'"%b"' % name in body for name in (b"kv_transfer_params", b"ec_transfer_params"))
    return quoted or (b"\\u00" in body and _ESCAPED.search(body) is not None)


def without_transfer(body: bytes) -> bytes:
    """The JSON object without them. What is nested too deeply to be looked at is left out as well."""
    document = orjson.loads(body)
    found = {
        name: value if name in OF_THE_PROMPT else _bare(value, _DEPTH)
        for name, value in document.items()
        if not _is_of_transfer(name, value)
    }
    return body if found == document else orjson.dumps(found)


def _bare(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        if not depth:
            return {}
        return {
            name: _bare(each, depth - 1) for name, each in value.items() if not _is_of_transfer(name, each)
        }
    if isinstance(value, list):
        return [_bare(each, depth - 1) for each in value] if depth else []
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and may_have_some(value.encode()):
        return _bare_text(value, depth)
    return value


def _bare_text(text: str, depth: int) -> str:
    """The same of JSON in a string."""
    try:
        return orjson.dumps(_bare(orjson.loads(text), depth - 1)).decode() if depth else ""
    except orjson.JSONDecodeError:
        return text


def _is_of_transfer(name: str, value: Any) -> bool:
    return _PREFILL_NAMES.fullmatch(name) is not None or (
        isinstance(value, dict) and not _SHAPE.isdisjoint(value)
    )
