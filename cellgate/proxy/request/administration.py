"""Which paths of an engine administer it, known by their words. Pure.

Engines get new ones with each release: so a path is not looked up, its words are. One with a word of
administration is refused; one of words that compute or tell, or below a versioned API, is harmless; of any
other nobody knows. What engines serve today is compared in tests/unit/request/test_engine_routes.py.
"""

from __future__ import annotations

import re
from enum import Enum, auto


class Standing(Enum):
    """What is known of a path."""

    ADMINISTERS = auto()
    HARMLESS = auto()
    UNKNOWN = auto()


_ADMINISTER = frozenset(
    b"abort aborts activate adapter adapters add admin administration alloc allocate attach begin "
    b"cache caches checker checkpoint clear close collective commit configure connect continue control "
    b"copy corpora corpus cors create cuda deactivate debug delete destroy detach disable disconnect "
    b"down drain dump dumper elastic enable end erase evict exec execute expert experts export fault "
    b"faults finish flush freeze gc gpu group groups hicache import init initialize initialise inject "
    b"install internal kill level load lock log logger logging logs lora loras memory migrate mode "
    b"mount offload open park patch pause paused prefetch profile profiler profiling props proxy pull "
    b"purge push put quit ray reboot rebalance record recording recover refit refresh register reinit "
    b"release reload remote remove rename replace repository reset resize restart restore resume rl "
    b"role roles rollback rotate rpc run save scale scaling schedule scheduler send session sessions "
    b"set setting settings shell shutdown sleep sleeping slot slots slow snapshot sources spec start "
    b"state states stop stream streams suspend swap switch sync system tensor tensors terminate tool "
    b"tools trace tracing train transfer unfreeze uninstall unload unlock unmount unpause unregister "
    b"unset up update updates upgrade upload wake wakeup warmup weight weights write".split()
)
_STEMS = re.compile(
    rb"abort|adapter|cache|flush|lora|offload|pause|profil|reload|repositor|sharedmem|shutdown|sleep|unload|wakeup"
    rb"|weight"
)
"""The same where words are not kept apart."""
_WHOLE = frozenset(
    (b"/server_info", b"/get_server_info", b"/kv_event_sources", b"/models", b"/is_scaling_elastic_ep")
)
"""They show addresses, or other models than the gate's; or they administer with another method."""
_TELLS = frozenset((b"/", b"/load"))
_HARMLESS = frozenset(
    b"answer apply ask audio call chat classification classify completion completions count decisions "
    b"detokenization detokenize docs embed embedding embeddings encode favicon function generate "
    b"generation generations generative get health healthz ico image images infer inference infill "
    b"info input invocations json list live livez loads message messages metrics model moderations "
    b"openapi parse ping pooling predict predictions question ready readyz reasoning redoc rerank "
    b"reranking response responses score scoring separate size speech stats status template text token "
    b"tokenize tokenizer tokens transcribe transcriptions translate translations version vertex video "
    b"videos world".split()
)
_VERSIONED = re.compile(rb"/(?:[a-z]+/)?v[0-9][a-z0-9]*/|/api/")
_WORDS = re.compile(rb"[a-z0-9]+")
_CAMEL = re.compile(rb"(?<=[a-z0-9])(?=[A-Z])")


def standing(path: bytes) -> Standing:
    """What is known of a path that is not in the table, decoded."""
    plain = path.lower()
    base = plain.rstrip(b"/") or b"/"
    if base in _TELLS:
        return Standing.HARMLESS
    words = {*_WORDS.findall(plain), *_WORDS.findall(_CAMEL.sub(b"_", path).lower())}
    if base in _WHOLE or not words.isdisjoint(_ADMINISTER) or _STEMS.search(plain):
        return Standing.ADMINISTERS
    if _VERSIONED.match(plain) or words <= _HARMLESS:
        return Standing.HARMLESS
    return Standing.UNKNOWN
