"""`cellgate plan`: how much of a model fits into a unit, or which free nodes should be units, as text."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cellgate.extras.planner import capacity
from cellgate.extras.planner.capacity import (
    GIB,
    Devices,
    LiveCache,
    LiveError,
    MemoryPlan,
    Shape,
    Workload,
    ask_cache,
    kv_bytes_per_token,
    parameters,
    plan_memory,
    read_shape,
    weight_bytes,
    windows,
)
from cellgate.extras.planner.topology import Pairing, pair, read_nodes
from cellgate.proxy.cli.terminal import CommandError, table
from cellgate.proxy.config.load_process import ConfigError

INDEX = "model.safetensors.index.json"
_UNITS = {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": GIB,
    "TIB": 1 << 40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}
_FAILED = 1
_CLOSE = 0.05


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; those of the engine have the names vLLM gives them."""
    add = parser.add_argument
    help_text = "a config.json, its directory, or the id of a model in the local hub cache (ORG/NAME)"
    add("model", metavar="MODEL", nargs="?", help=help_text)
    add(
        "--memory",
        metavar="SIZE",
        type=_size,
        help="memory of one device, such as 80GiB or 96GB",
    )
    add("--tensor-parallel-size", metavar="N", type=_positive, default=1, help="default: %(default)s")
    add("--pipeline-parallel-size", metavar="N", type=_positive, default=1, help="default: %(default)s")
    add("--gpu-memory-utilization", metavar="SHARE", type=_share, default=0.9, help="default: %(default)s")
    add(
        "--reserve",
        metavar="SIZE",
        type=_size,
        default=2 * GIB,
        help="memory of a device for activations and graphs; default: 2GiB",
    )
    add(
        "--context",
        metavar="TOKENS",
        type=_positive,
        default=4096,
        help="tokens of a sequence, prompt and answer; default: %(default)s",
    )
    add("--max-num-seqs", metavar="N", type=_positive, default=256, help="default: %(default)s")
    add("--block-size", metavar="TOKENS", type=_positive, default=16, help="default: %(default)s")
    add(
        "--kv-bits",
        metavar="N",
        type=_positive,
        help="bits of a cached value, 8 for fp8; default: those of the model's dtype",
    )
    add("--weight-bits", metavar="N", type=_bits, help="bits of a weight; default: as the file says")
    add("--unit", metavar="URL", help="a running unit whose KV cache is compared with the plan")
    add("--nodes", metavar="FILE", help="instead of MODEL: where free nodes stand; - reads standard input")
    add("--size", type=int, metavar="N", help="with --nodes: nodes of a unit")
    add("--json", action="store_true", help="with --nodes: the units as JSON")
    parser.set_defaults(misused=parser.error)


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan; 0 when the model fits and the unit that was named has answered.

    Raises ConfigError and CommandError.
    """
    if args.nodes is not None:
        return _run_pairing(args)
    if args.model is None:
        args.misused("give MODEL and --memory SIZE, or --nodes FILE and --size N")
    if args.memory is None:
        args.misused("the following arguments are required: --memory")
    file = _file(args.model)
    shape = read_shape(_json(file), str(file), args.weight_bits)
    devices = Devices(
        args.memory,
        args.tensor_parallel_size,
        args.pipeline_parallel_size,
        args.gpu_memory_utilization,
        args.reserve,
    )
    workload = Workload(args.context, args.max_num_seqs, args.kv_bits or shape.dtype_bits, args.block_size)
    scale = _scale(shape, file.parent / INDEX)
    made = plan_memory(shape, devices, workload, scale)
    for name, text in _lines(shape, devices, made, scale):
        print(f"{name:<10}{text}")
    if args.unit:
        try:
            print(f"{'unit':<10}{_compared(ask_cache(args.unit), made, shape)}")
        except LiveError as error:
            print(f"cellgate: {error}", file=sys.stderr)
            return _FAILED
    return 0 if made.fits else _FAILED


def _file(model: str) -> Path:
    """The config.json that is meant. Raises ConfigError when there is none."""
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or path.suffix == ".json":
        return path
    if found := capacity.snapshot(model):
        return found / "config.json"
    cache = capacity.hub()
    how = f"download it with: hf download {model} config.json"
    raise ConfigError([f"{model}: neither a file nor in the hub cache {cache}; {how}"])


def _lines(shape: Shape, devices: Devices, made: MemoryPlan, scale: float) -> Iterator[tuple[str, str]]:
    """The plan, a name and a text for each line."""
    work = made.workload
    yield "model", ", ".join(_model(shape))
    count = devices.tensor * devices.pipeline
    of = f", each stage of {devices.tensor}" if devices.pipeline > 1 else ""
    yield (
        "devices",
        f"{count} of {_gib(devices.memory_bytes)}{of}; the engine takes {devices.utilization:.0%}",
    )
    source = f"as {INDEX} says" if scale != 1.0 else "estimated"
    yield "weights", f"{_gib(made.weight_bytes)} a device ({source}), {_gib(devices.reserve_bytes)} reserved"
    if not made.fits:
        short = made.sequence_bytes - made.kv_bytes
        yield "fits", f"no: one sequence of {work.context:,} tokens needs {_gib(short)} more on each device"
        return
    token = kv_bytes_per_token(shape, devices.tensor, work.kv_bits)
    kept = "".join(f"; {layers} layers keep {window:,} tokens" for window, layers in windows(shape))
    yield "KV cache", f"{_gib(made.kv_bytes)} a device; a token takes {token:,.0f} bytes a layer{kept}"
    yield "fits", f"{made.tokens:,} tokens, {made.sequences:,} sequences of {work.context:,}"
    yield "configure", f"max_in_flight: {made.max_in_flight}, weight: {made.weight:g}"


def _model(shape: Shape) -> Iterator[str]:
    yield f"{shape.kind or 'unnamed'} of {parameters(shape) / 1e9:.4g}e9 parameters"
    yield f"{shape.layers} layers"
    if shape.latent is not None:
        yield f"latent attention ({shape.latent.kv_rank} + {shape.latent.rope_dim})"
    else:
        yield f"{shape.kv_heads} of {shape.heads} heads cached, {shape.head_dim} wide"
    if shape.experts is not None:
        yield f"{shape.experts.count} experts in {len(shape.experts.layers)} of them"
    yield f"{shape.weight_bits:.4g} bits a weight"


def _compared(live: LiveCache, made: MemoryPlan, shape: Shape) -> str:
    """The cache of the engine compared with the plan."""
    engines = f" in {live.engines} engines" if live.engines > 1 else ""
    text = f"{live.tokens:,} tokens ({live.blocks:,} blocks of {live.block}{engines})"
    if any(window is not None for window in shape.windows):
        return f"{text}; its blocks cover groups of layers and cannot be compared with the plan"
    ratio = live.tokens / made.tokens if made.tokens else float("inf")
    if abs(ratio - 1.0) <= _CLOSE:
        return f"{text}: as planned, within {_CLOSE:.0%}"
    which = "less" if ratio < 1.0 else "more"
    return (
        f"{text}: {ratio:.2f} x the plan; it has {which} room than --gpu-memory-utilization and --reserve say"
    )


def _scale(shape: Shape, index: Path) -> float:
    """By how much weights are larger than reckoned, going by the size of their files; 1 without an index."""
    if not index.is_file():
        return 1.0
    total = _json(index).get("metadata", {}).get("total_size")
    if not isinstance(total, int | float) or total <= 0:
        raise ConfigError([f"{index}: metadata.total_size is missing (bytes of all weights)"])
    return total * shape.dtype_bits / shape.file_bits / weight_bytes(shape, range(shape.layers), 1)


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"{file}: not JSON: {error}"]) from None
    if not isinstance(found, dict):
        raise ConfigError([f"{file}: expected an object, found {type(found).__name__}"])
    return found


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def _size(text: str) -> float:
    """Bytes of a size such as 80GiB or 96GB."""
    number = text.rstrip("BGIKMTbgikmt")
    unit = text[len(number) :].upper()
    try:
        size = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"expected a size such as 80GiB, found {text!r}") from None
    if not 0.0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a size such as 80GiB, found {text!r}")
    return size


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _bits(text: str) -> float:
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 1.0 <= bits <= 64.0:
        raise argparse.ArgumentTypeError(f"expected bits such as 8 or 4.25, found {text!r}")
    return bits


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and up to 1, found {text!r}")
    return share


# `cellgate plan --nodes FILE`: units from free nodes, which span as few layers of the network as possible.


def _run_pairing(args: argparse.Namespace) -> int:
    """Propose units, and say what they cost. Raises CommandError."""
    if args.model is not None:
        args.misused("--nodes proposes units of nodes, and takes no MODEL")
    if args.size is None or args.size < 1:
        args.misused("--nodes requires --size N, the nodes of a unit, at least 1")
    try:
        text = sys.stdin.read() if args.nodes == "-" else Path(args.nodes).read_text()
        pairing = pair(read_nodes(text), args.size)
    except OSError as error:
        raise CommandError(f"{args.nodes}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"{args.nodes}: {error}") from None
    print(_as_json(pairing) if args.json else _in_words(pairing))
    return 0


def _as_json(pairing: Pairing) -> str:
    units = [unit._asdict() for unit in pairing.units]
    return json.dumps({"units": units, "over": pairing.over, "span": pairing.span}, indent=2)


def _in_words(pairing: Pairing) -> str:
    rows = [["UNIT", "NODES", "UNDER", "SPAN", "GROUPS"]]
    for number, unit in enumerate(pairing.units, 1):
        under = "/".join(unit.under) or "nothing in common"
        rows.append([str(number), " ".join(unit.nodes), under, str(unit.span), str(unit.groups)])
    spans = Counter(unit.span for unit in pairing.units)
    how = ", ".join(f"{count} span {span} layers" for span, count in sorted(spans.items())) or "none"
    line = f"{len(pairing.units)} units: {how}; no other choice of units spans fewer layers in all"
    if pairing.over:
        line += f"\n{len(pairing.over)} nodes are left over: {' '.join(pairing.over)}"
    return f"{table(rows)}\n{line}"
