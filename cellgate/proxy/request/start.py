"""The begin of an exchange: the request is parsed, and a unit is found for it. Actions of the table.

In this order: `start`, `grant`, `name_model`, `prefilled`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import orjson

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.sse import BOM
from cellgate.proxy.observe.counters import FALLBACKS, NAMED, tally
from cellgate.proxy.request import prefill_decode
from cellgate.proxy.request.attempt import Attempt
from cellgate.proxy.request.body import is_large, plain_ask, read_ask, stored_ask
from cellgate.proxy.request.content_coding import Decoding, unsupported
from cellgate.proxy.request.doubts import show_first, spared
from cellgate.proxy.request.life import ExchangeState
from cellgate.proxy.request.models import (
    LATEST,
    ModelChoice,
    Naming,
    find_model,
    models_meant,
    with_form_model,
    with_model,
)
from cellgate.proxy.request.placement import not_here
from cellgate.proxy.request.prefill_decode import PrefillLeg, may_have_some, named_in, without_transfer
from cellgate.proxy.request.routes import (
    GENERATE,
    IN_FORM,
    IN_PATH,
    OWN,
    STICKY,
    UNLISTED,
    model_in,
    why_refused,
    with_path_model,
)
from cellgate.proxy.request.services import OPEN_ROUTES
from cellgate.proxy.request.stored_objects import is_collection, named_object, objects_in
from cellgate.proxy.request.unit_head import head_for_unit, names_rank, rank_line
from cellgate.proxy.resume.eligible import TOKENS, why_not_resumed
from cellgate.proxy.resume.transcript import asked_to_tell, can_tell
from cellgate.router.nouns import LINK_FAILED, TRANSFERRED, UNFIT, Ask, SplitStep
from cellgate.router.retry import Attempts
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.request.prefill_decode import Handoff, Rendezvous
    from cellgate.proxy.request.routes import ModelPlace
    from cellgate.proxy.request.services import Admission
    from cellgate.proxy.resume.chat import NextPart


_NODES_ON_LOOP = LIMITS.json_nodes_on_loop
_TINY = 2048
_TIMES_READ = 8
"""A byte of a body that is not tiny counts so many times in the turn in which requests begin: 128 kB of any
shape are read in one."""
WAITING, OVER = ExchangeState.WAITING, ExchangeState.OVER
_OF_ALL = Failure(
    FailureKind.UNKNOWN_PATH,
    "an engine cannot say what of its list is yours, so the gate shows none; ask for one by its id",
)

_SEVERAL = Failure(
    FailureKind.BAD_REQUEST, "it names several stored objects, which may be at several units; name one"
)


def start(exchange: Exchange) -> None:
    """Decide what kind of request it is, and begin."""
    route, request, gate = exchange.route, exchange.request, exchange.gate
    if gate.cors is not None:
        exchange.response.lines = gate.cors.lines(request)
        if request.method == b"OPTIONS":
            exchange.state = OVER
            exchange.response.answer(200, b"", b"allow: %b\r\n" % b", ".join(route.methods))
            return
    if (
        gate.identify is not None
        and route.name not in OPEN_ROUTES
        and not _enter(exchange, gate.identify(exchange))
    ):
        return
    if (request.is_placed or request.is_explained) and route.kind is not OWN:
        refusal = exchange.selection.apply_placement(request)
        if refusal is not None:
            refuse(exchange, refusal)
            return
        exchange.response.shows_internals = True
    kind = route.kind
    if kind is not GENERATE or request.method not in route.methods:
        why = why_refused(route, request.method, pass_unlisted=gate.settings.pass_unlisted)
        if why is not None:
            allows = why.kind is FailureKind.METHOD_NOT_ALLOWED
            exchange.state = OVER
            exchange.response.refuse(why, b"allow: %b\r\n" % b", ".join(route.methods) if allows else b"")
            return
        if kind is OWN:
            exchange.state = OVER
            answer = gate.local_endpoints.answer(request.path, stopping=gate.is_stopping)
            exchange.response.answer(*answer)
            return
        if exchange.admission is not None and _lists_all(exchange):
            _refuse_new(exchange, _OF_ALL)
            return
    _read(exchange)


def _lists_all(exchange: Exchange) -> bool:
    """Whether it asks what a unit has made, which may be other tenants'."""
    request, kind = exchange.request, exchange.route.kind
    return kind is UNLISTED and request.method != b"POST" and is_collection(request.path)


def _read(exchange: Exchange) -> None:
    """Read what the request asks for, from its body or its path. Large bodies are parsed off the loop."""
    route, request = exchange.route, exchange.request
    # Where there are keys, they say who pays.
    payer = ""
    if exchange.admission is None:
        payer = exchange.gate.payer(exchange.client.peer, request.forwarded_for)
    if request.coding:
        _decode(exchange)
    elif route.json or (route.model is IN_FORM and request.body.startswith(b"{")):
        body = request.body
        # Most are smaller than any that is worth knowing again.
        if len(body) > _NODES_ON_LOOP:
            _read_rest(exchange, payer)
        else:
            if len(body) > _TINY:
                exchange.gate.start_scheduler.has_room(_TIMES_READ * len(body))
            ask(exchange, read_ask(body, route.name, payer))
    elif route.kind is STICKY or (route.kind is UNLISTED and named_object(request.path) is not None):
        ask(exchange, stored_ask(request.path)._replace(payer=payer))
    elif route.kind is UNLISTED and (named := objects_in(request.body)):
        one = plain_ask(request.target, request.body)._replace(follows=named.pop(), payer=payer)
        ask(exchange, _SEVERAL if named else one)
    else:
        field = find_model(request.lines, request.body) if route.model is IN_FORM else None
        model = None if field is None else field.name
        ask(exchange, plain_ask(request.target, request.body)._replace(model=model, payer=payer))


def _decode(exchange: Exchange) -> None:
    """Have a compressed body decoded before it is read."""
    gate, request = exchange.gate, exchange.request
    if not request.body or request.coding == b"identity":
        request.coding = b""
        _read(exchange)
        return
    if (failure := unsupported(request.coding)) is not None:
        _refuse_new(exchange, failure)
        return

    def then(failure: Failure | None) -> None:
        exchange.stop_reading = None
        if failure is None:
            _read(exchange)
        else:
            _refuse_new(exchange, failure)

    decoding = Decoding(exchange, gate.memory, gate.settings.limits.body_bytes, then)
    exchange.stop_reading = decoding.stop
    decoding.resume_parsing()


def _read_rest(exchange: Exchange, named: str) -> None:
    """Read what is not known of a body, here or in another process. Who pays is its key, or where there is
    none, its client's address; `named` is what the ask says.
    """
    gate, admission, route = exchange.gate, exchange.admission, exchange.route.name
    payer = named if admission is None else admission.payer
    body, known = exchange.request.body, gate.beginnings
    place = known.find(body, route, payer)
    read: Ask | Failure | None = None
    if place is not None and not place.is_large():
        read = known.read(place, payer, named)
    if read is None:
        if is_large(body):
            why_not = _nothing if admission is None else admission.refusal
            exchange.stop_reading = gate.large_reads.start(
                exchange.request, payer, why_not, route, exchange.asked
            )
            return
        # What it has cost is not to be paid by whoever begins in the same turn.
        gate.start_scheduler.has_room(_TIMES_READ * len(body))
        read = read_ask(body, route, named)
    ask(exchange, read)


def _nothing() -> None:
    """There is no reason."""


def read_late(exchange: Exchange, read: Ask | Failure) -> None:
    """A large body was read."""
    if isinstance(read, Ask):
        payer = exchange.gate.payer(exchange.client.peer, exchange.request.forwarded_for)
        read = read._replace(payer=payer)
    ask(exchange, read)


def _enter(exchange: Exchange, found: Admission | Failure) -> bool:
    """Whether the request shows a key that counts. If not, the response has ended."""
    response = exchange.response
    if isinstance(found, Failure):
        exchange.state = OVER
        response.refuse(found)
        return False
    exchange.admission, response.observers = found, (found, *response.observers)
    return True


def ask(exchange: Exchange, read: Ask | Failure) -> None:
    """The request is parsed."""
    if isinstance(read, Failure):
        _refuse_new(exchange, read)
        return
    gate, request = exchange.gate, exchange.request
    asked = gate.routing_headers.apply(read, request.routing, request.received_at)
    if exchange.admission is not None and isinstance(asked, Ask):
        asked = exchange.admission.admit(asked, read.priority, exchange.route.model)
    if exchange.route.model is IN_PATH and isinstance(asked, Ask):
        asked = asked._replace(model=gate.local_endpoints.known(model_in(request.path)))
    if gate.models is not None and isinstance(asked, Ask):
        if exchange.route.name != "model":
            asked = name_model(exchange, gate.models, asked)
        elif card := gate.local_endpoints.model(request.path):
            exchange.state = OVER
            exchange.response.answer(200, card, b"")
            return
    if isinstance(asked, Failure):
        _refuse_new(exchange, asked)
        return
    exchange.selection.ask = asked
    exchange.response.model = asked.model or ""
    if gate.screen_request is not None and (_is_used_up(exchange) or gate.screen_request(exchange, asked)):
        return
    if exchange.admission is not None:
        exchange.selection.charge = exchange.admission.charge(asked)
    find_unit(exchange)


def _is_used_up(exchange: Exchange) -> bool:
    """Whether the request has ended, because a limit of its key is used up: a guardrail is not asked then."""
    refusal = exchange.admission.refusal() if exchange.admission is not None else None
    if refusal is not None:
        _refuse_new(exchange, refusal)
    return refusal is not None


def screened(exchange: Exchange, asked: Ask | Failure) -> None:
    """A guardrail has seen the request, and may have changed it."""
    if isinstance(asked, Failure):
        _refuse_new(exchange, asked)
        return
    exchange.selection.ask = asked
    # Only now: a request that was denied has used nothing.
    if exchange.admission is not None:
        exchange.selection.charge = exchange.admission.charge(asked)
    find_unit(exchange)


def _refuse_new(exchange: Exchange, failure: Failure) -> None:
    """No unit is looked for."""
    exchange.state = OVER
    exchange.response.refuse(failure)


def find_unit(exchange: Exchange, *, draws: bool = False, moved: bool = False) -> None:
    """Find a unit: the first, or the next one (see Selection.acquire)."""
    exchange.state = WAITING
    if exchange.gate.opinions.watching and not exchange.doubtful:
        exchange.selection.avoid = spared(exchange)
    found = exchange.selection.acquire(exchange, draws, moved)
    if isinstance(found, Lease):
        grant(exchange, found)
    elif found is not None:
        refuse(exchange, found)


def refuse(exchange: Exchange, failure: Failure) -> None:
    """There is no unit: another model serves it, or the client gets an error, as far as possible."""
    if exchange.doubtful and show_first(exchange):
        return
    goes_on = fall_back if exchange.gate.models is not None else pass_on
    if goes_on(exchange, failure):
        find_unit(exchange)
        return
    if failure.used_up and exchange.admission is not None:
        exchange.admission.used_up(failure)
    exchange.state = OVER
    response = exchange.response
    if not response.begun:
        reason = ""
        if exchange.request.is_placed:
            failure, reason = not_here(failure, exchange.gate.board, exchange.selection.ask.unit)
        response.refuse(failure, reason=reason)
    elif exchange.stream_resume is None:
        response.break_off(failure)
    else:
        exchange.stream_resume.no_unit(failure)


# Sends a request to a unit, or asks it to resume a stream that another one broke. Actions of the table.


BUFFERING, PROVING = ExchangeState.BUFFERING, ExchangeState.PROVING
_NOT_SEARCHED = Failure(
    FailureKind.BAD_JSON,
    "the body names parameters of a transfer of KV blocks, which only the gate may, in a form that cannot be "
    "taken out; send it without",
)


def grant(exchange: Exchange, lease: Lease) -> None:
    """A unit was found: send it the request."""
    response = exchange.response
    for observer in response.observers:
        observer.attempted(lease, response.attempts)
    response.attempts += 1
    response.rank = None
    begin(exchange, lease, fresh=False)


def begin(exchange: Exchange, lease: Lease, *, fresh: bool) -> None:
    """Send the request to the unit, on a new connection if `fresh`."""
    selection, request = exchange.selection, exchange.request
    exchange.attempt = attempt = Attempt(exchange, exchange.gate.dispatcher, exchange.response, lease)
    selection.given = None
    lease.on_evict = exchange.evicted
    # A kept connection may be stale and need a second try, which not every path allows.
    fresh = fresh or exchange.route.kind is UNLISTED
    if exchange.stream_resume is None:
        body = request.body
        if lease.unit_state.moves_blocks:
            request.lines = (
                prefill_decode.own_lines(request.lines) if lease.unit_state.meets else request.lines
            )
            reads_json = exchange.route.json or exchange.route.kind is UNLISTED
            bare = _bare(body) if reads_json else body
            if bare is None:
                exchange.state = BUFFERING
                exchange.stop(_NOT_SEARCHED)
                return
            if _begin_leg(exchange, lease, request.target, bare):
                return
            body = _stripped(bare, lease) if reads_json and bare.lstrip()[:1] == b"{" else bare
        exchange.state = BUFFERING
        attempt.shape = exchange.route.shape
        if selection.ask.continuable & TOKENS:
            state = lease.unit_state
            tells = can_tell(state.engine, state.build.version, exchange.route.name)
            if tells and not why_not_resumed(exchange.gate.settings.no_continuation, request, selection.ask):
                body, attempt.tells = asked_to_tell(body, tells)
        send_request(exchange, attempt, request.target, body, fresh=fresh)
        return
    if lease.split is not None and not lease.split.together:
        # A stream that is resumed has been split already.
        lease.split = None
    exchange.state = PROVING
    lines = exchange.gate.pool(lease.unit_state).lines
    head = partial(head_for_unit, request, exchange.client, exchange.response, lines)
    exchange.stream_resume.begin(exchange.proven, lease.unit_state, head, fresh=fresh)


def _bare(body: bytes) -> bytes | None:
    """The body without what only the gate may say of a transfer; None: it cannot be searched for that."""
    if body.lstrip()[:1] != b"{":
        # No object, or one in an encoding that some engines read and the gate does not.
        return None if b"\0" in body[:4] or body.startswith(BOM) else body
    if is_large(body):
        return None if named_in(body) else body
    if not may_have_some(body):
        return body
    try:
        return without_transfer(body)
    except (orjson.JSONDecodeError, TypeError):
        # No JSON, or nested too deeply to be written again.
        return None


def _stripped(body: bytes, lease: Lease) -> bytes:
    """The JSON object without the same at its top."""
    return (
        prefill_decode.without_bootstrap(body)
        if lease.unit_state.meets
        else prefill_decode.without_kv_params(body)
    )


def _begin_leg(exchange: Exchange, lease: Lease, target: bytes, body: bytes) -> bool:
    """Have the prompt of a request computed by another unit. False: it is not split, or cannot be."""
    request, response, gate = exchange.request, exchange.response, exchange.gate
    if (split := lease.split) is None:
        return False
    prompt: prefill_decode.PromptLeg | prefill_decode.Rendezvous | str
    if split.together:
        # Its body is not parsed, however large it is.
        prompt = prefill_decode.Rendezvous(body, gate.board.units[split.prefiller].unit, gate.rng)
    elif is_large(body):
        prompt = "the request is too large to be parsed again"
    else:
        prompt = prefill_decode.PromptLeg.of(body, response.request_id.decode("latin-1"))
    if isinstance(prompt, str):
        gate.reports.send(SplitStep(UNFIT, split.prefiller, lease.unit, reason=prompt))
        lease.split = None
        return False

    def head(lines: bytes, length: int) -> bytes:
        return head_for_unit(request, exchange.client, response, lines, target, length)

    # Nothing was sent to the decoder yet, so that its silence means nothing.
    lease.paused = True
    exchange.state = ExchangeState.PREFILLING
    exchange.leg = leg = PrefillLeg(exchange, exchange.prefilled, gate, lease, split, prompt, head)
    leg.target = target
    leg.begin(exchange.selection.ask)
    return True


def resume(exchange: Exchange, part: NextPart) -> None:
    """The unit has proven that it can resume the stream: send it the next part."""
    attempt = exchange.in_flight()
    assert exchange.stream_resume is not None
    exchange.state = ExchangeState.RESUMED
    attempt.resume_with(exchange.stream_resume.replay, part.joiner)
    if _begin_leg(exchange, attempt.lease, part.target, part.body):
        return
    send_request(exchange, attempt, part.target, part.body, fresh=False)


def send_request(exchange: Exchange, attempt: Attempt, target: bytes, body: bytes, *, fresh: bool) -> None:
    """Send `body` to the path `target` of the unit."""
    lease, request = attempt.lease, exchange.request
    pool = exchange.gate.pool(lease.unit_state)
    lines = pool.lines if lease.rank < 0 else pool.lines + _rank_line(exchange, lease.rank)
    head = head_for_unit(request, exchange.client, exchange.response, lines, target, len(body))
    attempt.send(head, body, pool, to_head=request.method == b"HEAD", fresh=fresh)


def _rank_line(exchange: Exchange, rank: int) -> bytes:
    """The header line of the rank that was chosen; none where the client has chosen one itself."""
    if names_rank(exchange.request):
        return b""
    exchange.response.rank = rank
    return rank_line(rank)


# Gives a request the model that serves the name its client wrote, and another one when no unit can.
#
# The rest of the gate knows only the model that serves: it stands in the ask and in the body that units
# get.


_NOT_FOUND = Failure(
    FailureKind.BODY_TOO_LARGE,
    "the gate cannot write the model into this body; put `model` first, before the messages",
    param="model",
)
_NO_UNIT_LEFT = frozenset(
    {
        FailureKind.NO_UNIT,
        FailureKind.UNKNOWN_MODEL,
        FailureKind.MODEL_GONE,
        FailureKind.EVICTED,
        FailureKind.REFUSED,
        FailureKind.UNREACHABLE,
        FailureKind.CONNECT_TIMEOUT,
    }
)
"""What says that no unit can serve a model now. That all are busy is not among it: then requests wait."""


def name_model(exchange: Exchange, choice: ModelChoice, ask: Ask) -> Ask | Failure:
    """The ask with the model that serves it."""
    asked = ask.model
    if asked is None:
        return ask
    naming = Naming(choice, asked, ask.session or exchange.response.request_id.decode("latin-1"))
    exchange.naming = naming
    served = naming.served(asked)
    if asked in choice.names:
        tally(NAMED, asked, served)
    return _served_by(exchange, naming, ask, served)


def fall_back(exchange: Exchange, failure: Failure) -> bool:
    """Whether another model is tried for a request that no unit could serve: its ask says which."""
    # A request without a model has no names.
    naming, selection = getattr(exchange, "naming", None), exchange.selection
    if naming is None or failure.kind not in _NO_UNIT_LEFT:
        return False
    if exchange.response.begun or exchange.request.is_placed:
        return False
    before, model = naming.name, naming.next()
    admission = exchange.admission
    while model is not None and admission is not None and not admission.may_fall_back(naming.name):
        model = naming.next()
    if model is None:
        return False
    tally(FALLBACKS, before, naming.name)
    ask = _served_by(exchange, naming, selection.ask, model)
    if isinstance(ask, Failure):
        return False
    selection.ask, selection.failure, selection.history = ask, None, Attempts()
    exchange.response.model = model
    return True


def pass_on(exchange: Exchange, failure: Failure) -> bool:
    """Whether a request for a name that no unit lists goes to units as it is."""
    ask, admission = exchange.selection.ask, exchange.admission
    if failure.kind is not FailureKind.UNKNOWN_MODEL or exchange.response.begun or ask.model is None:
        return False
    meant = models_meant(exchange.gate.board, ask.model)
    is_tag = meant == {ask.model + LATEST}
    if not meant or (admission is not None and not is_tag and not all(map(admission.may_fall_back, meant))):
        return False
    model = ask.model + LATEST if is_tag else None
    exchange.selection.ask = ask._replace(model=model)
    exchange.response.model = model or ""
    return True


def _served_by(exchange: Exchange, naming: Naming, ask: Ask, model: str) -> Ask | Failure:
    """Write the model into the body and the ask, and into a line of the response."""
    response, request, before = exchange.response, exchange.request, ask.model or ""
    if model != before and not _write(request, exchange.route.model, before, model):
        return _NOT_FOUND
    response.lines = response.lines.replace(naming.reported, b"")
    naming.reported = naming.line(model) if model != naming.asked else b""
    response.lines += naming.reported
    return ask._replace(model=model)


def _write(request: Request, place: ModelPlace, before: str, model: str) -> bool:
    """Write the model where the request names it. False: it was not found there."""
    body: bytes | None
    if place is IN_PATH:
        request.target = with_path_model(request.target, model)
        return True
    if place is IN_FORM and find_model(request.lines, request.body) is not None:
        body = with_form_model(request.lines, request.body, model)
    else:
        body = with_model(request.body, before, model)
    if body is None:
        return False
    request.body = body
    return True


# What follows from leg 1 of a split request, and from the transfer of its blocks. Actions of the table.
#
# A transfer that fails or does not come is the fault of the link, not of the decoder: the decoder computes
# the prompt itself, under the same lease. One that cannot is left, and another pair is chosen.


OF_LINKS = (FailureKind.UNIT_ERROR, FailureKind.FIRST_EVENT_ERROR, FailureKind.TRANSFER_FAILED)
"""What a decoder answers that could not fetch the blocks. One that is gone, or busy, answers none of this."""
START_FULL_S = 10.0
"""So much longer a transfer may take to a decoder that may be full."""
_SENT_STATES_ONCE = (ExchangeState.BUFFERING, ExchangeState.RESUMED)


def prefilled(exchange: Exchange, turn: Handoff | Rendezvous | None) -> None:
    """It is the decoder's turn. None: the prompt was not computed, and the decoder computes it."""
    attempt, leg = exchange.in_flight(), exchange.leg
    assert leg is not None
    lease, now = attempt.lease, exchange.gate.now()
    if not leg.split.together:
        _expect(exchange, lease)
    if turn is None:
        lease.split = exchange.leg = None
        begin(exchange, lease, fresh=False)
        return
    is_resumed = exchange.stream_resume is not None
    exchange.state = ExchangeState.RESUMED if is_resumed else ExchangeState.BUFFERING
    leg.sent_at = now
    # Of a stream that is resumed, only the end may be missing.
    attempt.needs_token = not is_resumed
    # A kept connection may be stale, and the blocks are handed over once.
    send_request(exchange, attempt, leg.target, turn.spend(), fresh=True)


def _expect(exchange: Exchange, lease: Lease) -> None:
    """From here on the silence of a decoder means something."""
    lease.paused = exchange.response.paused
    lease.unit_state.work_at = exchange.gate.now()


def tick(exchange: Exchange, now: float) -> None:
    """Time has passed while the prompt is computed."""
    assert exchange.leg is not None
    if not exchange.response.paused:
        exchange.response.keep_warm(now, exchange.gate.settings.timeouts.head_hold_s)
    exchange.leg.tick(now)


def arrived(exchange: Exchange, lease: Lease) -> None:
    """The decoder has sent something: it has the blocks. The leg with its copies of the prompt is not kept as
    long as the stream.
    """
    leg, exchange.leg = exchange.leg, None
    assert leg is not None
    if exchange.response.status >= 400:
        # An error for the client: no blocks were needed.
        leg.drop()
        return
    leg.settle()
    split = leg.split
    # An answer that comes as a whole says little about the transfer.
    seconds = lease.first_at - leg.sent_at if lease.ask.stream else 0.0
    if split.together:
        _expect(exchange, lease)
        # Its part that was spent on the prompt is not known better.
        seconds = max(0.0, seconds - split.prefill_s)
    step = SplitStep(TRANSFERRED, split.prefiller, lease.unit, split.tokens, seconds)
    exchange.gate.reports.send(step)


def is_overdue(exchange: Exchange, lease: Lease, now: float) -> bool:
    """Whether the blocks have not come for too long, although their decoder works.

    A decoder that does nothing is judged by its own silence. One that is full begins with nobody: it has
    longer, until it begins to answer a request that came later.
    """
    split, leg = lease.split, exchange.leg
    if split is None or leg is None or not leg.sent_at or exchange.state not in _SENT_STATES_ONCE:
        return False
    over_s = now - leg.sent_at - split.limit_s
    if over_s <= 0.0 or lease.unit_state.progress_at <= leg.sent_at:
        return False
    return not split.may_wait or over_s > START_FULL_S or _was_overtaken(lease, leg.sent_at)


def _was_overtaken(lease: Lease, sent_at: float) -> bool:
    """Whether the decoder has begun to answer a request that it got later."""
    return any(other.committed and other.opened_at > sent_at for other in lease.unit_state.leases)


def link_failed(exchange: Exchange, reason: str) -> None:
    """The blocks have not arrived."""
    leg, exchange.leg = exchange.leg, None
    assert leg is not None
    split = leg.split
    step = SplitStep(LINK_FAILED, split.prefiller, leg.decoder.unit, split.tokens, reason=reason)
    exchange.gate.reports.send(step)
    leg.drop()


def compute_here(exchange: Exchange) -> None:
    """The decoder computes the prompt itself."""
    lease = exchange.in_flight().lease
    lease.split = None
    lease.unit_state.work_at = exchange.gate.now()
    begin(exchange, lease, fresh=False)
