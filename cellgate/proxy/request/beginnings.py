"""What is known of recent bodies: the beginning of a conversation is recognised, and only the rest read.

An agent sends all of its messages again with each turn: of hundreds of kilobytes some few are new.

1. What was learnt of a run of messages (conversation.py) is kept below the run before it, by its length and a
   hash of its bytes, of 128 bits, seeded in each process. It is a tree: conversations share what they
   have in common.
2. So is what was learnt of a frame, by the route and the bytes of both its parts.
3. Each payer has its own, so that nobody's text makes another's request faster. When memory runs out, a payer
   that has half of it loses what it has not used for longest; else it is who has not asked for longest.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_128_intdigest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.request.body import is_large
from cellgate.proxy.request.conversation import (
    FRAME_BYTES,
    RUN_BYTES,
    SEARCHED_BYTES,
    Conversation,
    Frame,
    FrameAsk,
    PromptSoFar,
    RunRead,
    UnusualError,
    asked,
    begin_of,
    begun,
    cuts_in,
    find_frame,
    next_cut,
    read_runs,
)
from cellgate.router.nouns import Ask

_SEED = secrets.randbits(63)
_MARK_BYTES = 16
"""So many bytes are compared before a hash is taken."""
_TRIES = 4
"""So many of the runs, or of the frames, that were used last are looked at first."""
_SEARCHES = 4
"""So often a run is looked for among all below another one."""
_LENGTHS = 16
_FRAMES = 256
"""Frames that are kept for one payer, and different lengths of them."""
_MORE_BYTES = 8192
"""A frame is not kept if it has more that is no part of the messages and is not hashed before."""
_FRAME_COST, _RUN_COST, _BLOCK_COST = 2048, 1536, 40
"""Bytes of memory that one takes, at most; a run has blocks beside that."""

FrameKey = tuple[str, int, int, int, int]
"""Its route, the length of its two parts, and their hashes."""
RunKey = tuple[int, int]
"""The length of its bytes (of a root, its pieces), and their hash."""
_Lengths = tuple[str, int, int]


class Beginnings:
    """What is known of bodies, in at most `limit` bytes."""

    def __init__(self, limit: int = LIMITS.beginnings_bytes) -> None:
        self._limit = limit
        self._payers: OrderedDict[str, _Payer] = OrderedDict()
        """Who has asked last is the last."""
        self.cost = 0
        """Bytes of memory, reckoned."""

    def find(self, body: bytes, route: str, payer: str) -> KnownPart | None:
        """How much is known of a body for which `payer` pays; None: it is to be read as a whole."""
        try:
            return self._payers.get(payer, _NOBODY).find(body, route)
        except UnusualError:
            return None

    def read(self, place: KnownPart, payer: str, named: str = "") -> Ask | None:
        """What a body asks for, whose unknown part is now read and kept for `payer`; `named` is the payer in
        its ask. None: it is to be read as a whole.
        """
        body, begin, end, frame, path, at, cuts = place
        try:
            steps = read_runs(body, begin, at, cuts, end, path[-1].written)
            written = steps[-1].written if steps else path[-1].written
            blocks = [run.blocks for run in path] + [step.blocks for step in steps]
            ask = asked(frame.asking, blocks, written, named)
        except UnusualError:
            return None
        self._keep(place, steps, payer)
        return ask

    def learn(self, body: bytes, read: Conversation, payer: str) -> None:
        """Keep what was read of a body elsewhere."""
        kept = self._payers.get(payer, _NOBODY).kept(body, read.frame, read.ask.route)
        begin = read.frame.begin
        self._keep(KnownPart(body, begin, read.frame.end, kept, [kept.root], begin, []), read.steps, payer)

    def _keep(self, place: KnownPart, steps: list[RunRead], payer: str) -> None:
        known = self._payers.get(payer)
        if known is None:
            known = self._payers[payer] = _Payer()
        self._payers.move_to_end(payer)
        before = known.cost
        known.keep(place, steps)
        self.cost += known.cost - before
        while self.cost > self._limit:
            self._forget(payer)

    def _forget(self, payer: str) -> None:
        """Make room, for what `payer` has just brought."""
        known = self._payers[payer]
        if known.cost <= self._limit / 2:
            payer, known = next(iter(self._payers.items()))
        before = known.cost
        known.forget_one()
        self.cost += known.cost - before
        if not known.cost:
            del self._payers[payer]


class Run:
    """A run of messages below those before it. The root has none: it is what comes before all messages."""

    __slots__ = ("blocks", "children", "key", "mark", "parent", "written")

    def __init__(
        self, parent: Run | None, key: RunKey, mark: bytes, blocks: tuple[int, ...], written: PromptSoFar
    ) -> None:
        self.parent = parent
        self.key = key
        self.mark = mark
        """Its last bytes."""
        self.blocks = blocks
        self.written = written
        self.children: dict[RunKey, Run] = {}
        """The one that was used last is the last."""

    @property
    def cost(self) -> int:
        """The memory that it takes."""
        return _RUN_COST + _BLOCK_COST * len(self.blocks)

    @property
    def is_short(self) -> bool:
        """Whether more messages go into the same run."""
        return self.parent is not None and self.key[0] < RUN_BYTES


class KeptFrame(NamedTuple):
    """What is kept of a frame: `root` is what its prompt begins with."""

    key: FrameKey
    root: Run
    asking: FrameAsk

    @property
    def cost(self) -> int:
        """The memory that it takes."""
        return _FRAME_COST + len(self.asking.suffix) + len(self.asking.more)


class KnownPart(NamedTuple):
    """How much of a body is known: all runs of `path`, which end at `at`. Messages stand from `begin` to
    `end`; `cuts` are where those that are not known may be cut.
    """

    body: bytes
    begin: int
    end: int
    frame: KeptFrame
    path: list[Run]
    at: int
    cuts: list[int]

    def is_large(self) -> bool:
        """Whether what is new must be read in another process."""
        return is_large(self.body if self.at == self.begin else self.body[self.at : self.end])


class _Payer:
    """What is kept for one payer."""

    __slots__ = ("cost", "frames", "leaves", "lengths", "roots")

    def __init__(self) -> None:
        self.cost = 0
        self.frames: OrderedDict[FrameKey, KeptFrame] = OrderedDict()
        self.lengths: OrderedDict[_Lengths, tuple[bytes, bytes]] = OrderedDict()
        """Of the frames used last, with the bytes around their messages."""
        self.roots: OrderedDict[RunKey, Run] = OrderedDict()
        self.leaves: OrderedDict[Run, None] = OrderedDict()
        """Runs with none below them. Of all of these the one used last is the last."""

    # -- looking -------------------------------------------------------------------------------------------

    def find(self, body: bytes, route: str) -> KnownPart:
        """How much of a body is known. Raises UnusualError."""
        for lengths, marks in islice(reversed(self.lengths.items()), _LENGTHS):
            begin, end = lengths[1], len(body) - lengths[2]
            if lengths[0] == route and begin <= end and marks == _marks(body, begin, end):
                frame = self.frames.get(_frame_key(body, begin, end, route))
                if frame is not None:
                    path, at = _walk(frame.root, body, begin, end)
                    _check_rest(end - at)
                    return KnownPart(body, begin, end, frame, path, at, cuts_in(body, _begin(path, at), end))
        return self._find_anew(body, route)

    def _find_anew(self, body: bytes, route: str) -> KnownPart:
        """The same of a body whose frame is not known."""
        begin = begin_of(body, route)
        path, at = [], begin
        for root in islice(reversed(self.roots.values()), _TRIES):
            other, end = _walk(root, body, begin, len(body))
            if end > at:
                path, at = other, end
        _check_rest(len(body) - at - FRAME_BYTES)
        cuts = cuts_in(body, _begin(path, at), len(body))
        frame = find_frame(body, begin, cuts[-1] if cuts else at, route)
        kept = self.kept(body, frame, route)
        if not path or path[0] is not kept.root:
            path, at = _walk(kept.root, body, begin, frame.end)
            cuts = cuts_in(body, _begin(path, at), frame.end)
        return KnownPart(body, begin, frame.end, kept, path, at, cuts)

    def kept(self, body: bytes, frame: Frame, route: str) -> KeptFrame:
        """What is to be kept of a frame, with its root. Raises UnusualError."""
        key = frame.pieces, xxh3_128_intdigest(frame.preamble, frame.seed ^ _SEED)
        root = self.roots.get(key) or Run(None, key, b"", *begun(frame))
        return KeptFrame(_frame_key(body, frame.begin, frame.end, route), root, frame.asking)

    # -- keeping -------------------------------------------------------------------------------------------

    def keep(self, place: KnownPart, steps: list[RunRead]) -> None:
        """Keep what was found, and the runs that were read behind it."""
        self._keep_frame(place)
        body, run, begin = place.body, place.path[-1], place.at
        blocks: tuple[int, ...] = ()
        if run.is_short and steps:
            # The rest of it has come.
            assert run.parent is not None
            begin, blocks = place.at - run.key[0], run.blocks
            if run in self.leaves:
                self._drop(run)
            run = run.parent
        for step in steps:
            key = step.end - begin, xxh3_128_intdigest(memoryview(body)[begin : step.end], _SEED)
            below = run.children.get(key)
            if below is None:
                mark = body[max(begin, step.end - _MARK_BYTES) : step.end]
                below = run.children[key] = Run(run, key, mark, blocks + step.blocks, step.written)
                self.cost += below.cost
                self.leaves.pop(run, None)
                self.leaves[below] = None
            run, begin, blocks = below, step.end, ()
        self._use(run)

    def _keep_frame(self, place: KnownPart) -> None:
        frame, (route, begin, behind, *_) = place.frame, place.frame.key
        if frame.root.key not in self.roots:
            self.roots[frame.root.key] = frame.root
            self.leaves[frame.root] = None
            self.cost += frame.root.cost
        if frame.key not in self.frames and len(frame.asking.suffix) + len(frame.asking.more) <= _MORE_BYTES:
            self.frames[frame.key] = frame
            self.cost += frame.cost
            if len(self.frames) > _FRAMES:
                self._drop_frame(next(iter(self.frames)))
        if frame.key in self.frames:
            self.frames.move_to_end(frame.key)
            self.lengths[route, begin, behind] = _marks(place.body, place.begin, place.end)
            self.lengths.move_to_end((route, begin, behind))
            if len(self.lengths) > _FRAMES:
                self.lengths.popitem(last=False)

    def _use(self, run: Run) -> None:
        """It was used last."""
        if run in self.leaves:
            self.leaves.move_to_end(run)
        while (above := run.parent) is not None:
            if len(above.children) > 1:
                above.children[run.key] = above.children.pop(run.key)
            run = above
        self.roots.move_to_end(run.key)

    # -- forgetting ----------------------------------------------------------------------------------------

    def forget_one(self) -> None:
        """Forget what was not used for longest."""
        if self.leaves:
            self._drop(next(iter(self.leaves)))
        else:
            self._drop_frame(next(iter(self.frames)))

    def _drop(self, leaf: Run) -> None:
        above = leaf.parent
        self.cost -= leaf.cost
        del self.leaves[leaf]
        if above is None:
            del self.roots[leaf.key]
            for key in [key for key, frame in self.frames.items() if frame.root is leaf]:
                self._drop_frame(key)
            return
        del above.children[leaf.key]
        if not above.children:
            self.leaves[above] = None
            self.leaves.move_to_end(above, last=False)

    def _drop_frame(self, key: FrameKey) -> None:
        self.cost -= self.frames.pop(key).cost


_NOBODY = _Payer()


def _walk(root: Run, body: bytes, at: int, end: int) -> tuple[list[Run], int]:
    """The runs below `root` that a body has from `at` on, and where they end."""
    path, run, view, searches = [root], root, memoryview(body), _SEARCHES
    while run.children:
        below = _last_used(run, body, view, at, end)
        if below is None and len(run.children) > _TRIES and searches:
            searches -= 1
            cut = next_cut(body, at, min(end, at + RUN_BYTES + SEARCHED_BYTES // _SEARCHES))
            below = run.children.get((cut - at, xxh3_128_intdigest(view[at:cut], _SEED))) if cut else None
        if below is None:
            break
        path.append(below)
        run, at = below, at + below.key[0]
    return path, at


def _last_used(run: Run, body: bytes, view: memoryview, at: int, end: int) -> Run | None:
    """The run that comes next in a body, if it is among those that were used last."""
    for key, below in islice(reversed(run.children.items()), _TRIES):
        stop = at + key[0]
        if (
            stop <= end
            and body.endswith(below.mark, at, stop)
            and xxh3_128_intdigest(view[at:stop], _SEED) == key[1]
        ):
            return below
    return None


def _check_rest(size: int) -> None:
    """Raises UnusualError for so much that it is not even looked at on the loop."""
    if size > LIMITS.json_bytes_on_loop:
        raise UnusualError


def _begin(path: list[Run], at: int) -> int:
    """Where the run begins that goes on at `at`."""
    return at - path[-1].key[0] if path and path[-1].is_short else at


def _marks(body: bytes, begin: int, end: int) -> tuple[bytes, bytes]:
    """The bytes around the messages."""
    return body[begin - _MARK_BYTES : begin], body[end : end + _MARK_BYTES]


def _frame_key(body: bytes, begin: int, end: int, route: str) -> FrameKey:
    view = memoryview(body)
    before, behind = (xxh3_128_intdigest(part, _SEED) for part in (view[:begin], view[end:]))
    return route, begin, len(body) - end, before, behind
