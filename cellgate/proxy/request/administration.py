"""The standing of a path at an engine: whether it administers it, known by its words. Pure.

Engines get new ones with each release: so a path is not looked up, its words are. One with a word of
administration is refused; one of words that compute or tell is harmless, as is what is made below a
versioned API, by its id; of any other nobody knows. What engines serve today is compared in
tests/unit/request/test_routes.py.
"""

from __future__ import annotations

import re
from enum import Enum, auto


class Standing(Enum):
    """What is known of a path."""

    ADMINISTERS = auto()
    HARMLESS = auto()
    READABLE = auto()
    """Harmless to be read: something below what is."""
    UNKNOWN = auto()


_ADMINISTER = frozenset(
    b"abort aborts activate adapter adapters add admin administration alloc allocate attach ban begin "
    b"cache caches checker checkpoint clear close collective commit configure connect continue "
    b"control copy cordon corpora corpus cors create cuda deactivate debug delete demote deploy "
    b"destroy detach disable disconnect down drain drop dump dumper elastic enable end erase evacuate "
    b"evict exec execute exit expert experts expire export failover fault faults finish flush freeze "
    b"gc gpu group groups halt hibernate hicache import init initialise initialize inject install "
    b"internal invalidate kick kill level load lock log logger logging logs lora loras memory migrate "
    b"mode mount offload open park patch pause paused pin prefetch profile profiler profiling promote "
    b"props proxy prune pull purge push put quiesce quit ray rebalance reboot reclaim record "
    b"recording recover refit refresh register reindex reinit release reload remote remove rename "
    b"replace repository reset resize restart restore resume retire rl role roles rollback rotate rpc "
    b"run save scale scaling schedule scheduler send session sessions set setting settings shell "
    b"shutdown sleep sleeping slot slots slow snapshot sources spec stall standby start state states "
    b"stop stream streams suspend swap switch sync system tensor tensors terminate thaw throttle tool "
    b"tools trace tracing train transfer truncate unban uncordon undeploy undrain unfreeze uninstall "
    b"unload unlock unmount unpause unpin unregister unset up update updates upgrade upload vacuum "
    b"wake wakeup warm warmup weight weights wipe write zap".split()
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
_ADMIN_PATH_KNOWN = frozenset((b"/", b"/load", b"/generate_stream", b"/v1/audio/speech/stream"))
"""They compute or tell, whatever their words are."""
_ADMIN_PATH_HARMLESS = frozenset(
    b"all answer api apply ask audio call chat classification classify completion completions count "
    b"decisions decode detokenization detokenize doc docs embed embedding embeddings encode favicon "
    b"function generate generation generations generative get health healthz ico image images infer "
    b"inference infill info input invocations json list live livez loads message messages metrics model "
    b"moderations openapi parse ping pooling predict predictions question ready readyz reasoning redoc "
    b"rerank reranking response responses score scoring separate similarity size sparse speech stats "
    b"status template text token tokenize tokenizer tokens transcribe transcriptions translate "
    b"translations version vertex video videos world".split()
)
_BELOW_VERSION = _ADMIN_PATH_HARMLESS | frozenset(
    b"asr assistants batch batches calls cancel client complete containers content conversations derender "
    b"document documents edits evals file files item items license manifest meshes metadata models ocr "
    b"parts ps query rank ranking realtime remix render runs search secrets segment show sound speaker "
    b"speakers steps stores stt summarize systemone tags thread threads timestamps tts vad variations "
    b"vector voice voices".split()
)
"""Words of APIs of users, where a version says that it is one."""
_VERSIONED = re.compile(rb"(?:/[a-z]+)?/v[0-9][a-z0-9]*/|/api/(?:v[0-9]+/)?")
_DIGIT = re.compile(rb"[0-9]")
_PATH_WORDS = re.compile(rb"[a-z0-9]+")
_CAMEL = re.compile(rb"(?<=[a-z0-9])(?=[A-Z])")


def standing(path: bytes) -> Standing:
    """What is known of a path that is not in the table, decoded."""
    plain = path.lower()
    base = plain.rstrip(b"/") or b"/"
    if base in _ADMIN_PATH_KNOWN:
        return Standing.HARMLESS
    words = {*_PATH_WORDS.findall(plain), *_PATH_WORDS.findall(_CAMEL.sub(b"_", path).lower())}
    if base in _WHOLE or not words.isdisjoint(_ADMINISTER) or _STEMS.search(plain):
        return Standing.ADMINISTERS
    if words and words <= _ADMIN_PATH_HARMLESS:
        return Standing.HARMLESS
    found = _VERSIONED.match(base)
    return Standing.UNKNOWN if found is None else _below_version(base[found.end() :].split(b"/"))


def _below_version(parts: list[bytes]) -> Standing:
    """What is known of the parts of a path behind a version: each is known, or an id (with a digit)."""
    known = [bool(words := _PATH_WORDS.findall(part)) and _BELOW_VERSION.issuperset(words) for part in parts]
    if not known[0]:
        return Standing.UNKNOWN
    if all(is_known or _DIGIT.search(part) for is_known, part in zip(known, parts, strict=True)):
        return Standing.HARMLESS
    return Standing.READABLE
