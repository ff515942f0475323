"""`cellgate plan`: published figures of models, splits, windows, bad files; and units from free nodes."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cellgate.extras.orchestrators import SCHEMES
from cellgate.extras.planner import capacity
from cellgate.extras.planner import plan_command as plan
from cellgate.extras.planner.capacity import (
    GIB,
    Devices,
    LiveCache,
    LiveError,
    Shape,
    Workload,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    parameters,
    plan_memory,
    read_cache,
    read_shape,
    stages,
    weight_bytes,
)
from cellgate.extras.planner.topology import PlacedNode, pair, read_nodes
from cellgate.proxy.cli import main
from cellgate.proxy.config.load_process import ConfigError
from tests.unit.test_documented_commands import LLAMA_8B


def test_ec2_tells_network_nodes_from_the_widest_to_the_narrowest() -> None:
    """Kubernetes tells it by labels; a list of our own may be YAML."""
    layers = ["nn-1", "nn-2", "nn-3"]
    told: dict[str, Any] = {"InstanceId": "i-1", "NetworkNodes": layers, "AvailabilityZone": "us-west-2a"}
    assert read_nodes(json.dumps({"Instances": [told]})) == [PlacedNode("i-1", tuple(layers))]
    for scheme in SCHEMES.values():
        labels = dict(zip(scheme, layers, strict=False)) | {"other": "x"}
        told = {"metadata": {"name": "node-1", "labels": labels}}
        found = read_nodes(json.dumps({"kind": "List", "items": [told]}))
        assert found == [PlacedNode("node-1", tuple(layers[: len(scheme)]))]
    assert read_nodes("- {name: a, place: [z, s]}") == [PlacedNode("a", ("z", "s"))]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "neither JSON nor YAML"),
        ("7", "no list of nodes"),
        ("{}", "no list of nodes"),
        ("[{}]", "lacks 'name'"),
        ("[{name: a, place: b}]", "a name and a place of strings"),
        ('{"Instances": [{"InstanceId": "i"}]}', "lacks 'NetworkNodes'"),
        ('{"items": [{"metadata": {"name": "n"}}]}', "not all nodes have the labels of one scheme"),
    ],
)
def test_what_it_cannot_read_it_says_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        read_nodes(text)
    assert "\n" not in str(refused.value)


def test_the_command_proposes_units_from_a_file_of_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"name": f"n{number}", "place": ["z", f"leaf-{number // 2}"]} for number in range(4)]
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))
    assert main.main(["plan", "--nodes", str(tmp_path / "nodes.json"), "--size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [unit["nodes"] for unit in found["units"]] == [["n0", "n1"], ["n2", "n3"]]
    assert (found["span"], found["over"]) == (0, [])


LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672
}  # fmt: skip
MIXTRAL = LLAMA_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "sliding_window": None,
}
GEMMA_2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "torch_dtype": "float32",
}  # fmt: skip
QWEN_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
    "vocab_size": 201088, "sliding_window": 128, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "vocab_size": 129280, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def shape(config: dict[str, Any], **more: Any) -> Shape:
    return read_shape(config | more)


@pytest.mark.parametrize(
    ("config", "billions", "file_bytes"),
    [
        # As the models' cards and papers say; the last without its multi-token prediction: 671e9 weights of
        # eight bits, those of its tables of sixteen.
        (LLAMA_8B, 8.03, 16.06e9),
        (LLAMA_70B, 70.6, None),
        (MIXTRAL, 46.7, None),
        (GEMMA_2_9B, 9.24, None),
        (QWEN_235B, 235.0, None),
        (GPT_OSS_120B, 116.8, 65.2e9),
        (DEEPSEEK_V3, 671.0, 673e9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_as_published_and_checkpoints_weigh_what_their_files_weigh(
    config: dict[str, Any], billions: float, file_bytes: float | None
) -> None:
    one = shape(config)
    assert parameters(one) / 1e9 == pytest.approx(billions, rel=0.002)
    if file_bytes:
        assert weight_bytes(one, range(one.layers), 1) == pytest.approx(file_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("config", "tensor", "kv_bits", "kib"),
    [
        (LLAMA_8B, 1, 16, 128),
        (LLAMA_8B, 1, 8, 64),
        (LLAMA_70B, 1, 16, 320),
        (LLAMA_70B, 8, 16, 40),
        # Each device keeps one head of keys and values, even where there are fewer heads than devices.
        (LLAMA_70B, 16, 16, 40),
        # DeepSeek-V3: 70.3 kB a token, whole on every device.
        (DEEPSEEK_V3, 1, 16, 68.625),
        (DEEPSEEK_V3, 8, 16, 68.625),
    ],
)
def test_a_token_takes_what_its_heads_take(
    config: dict[str, Any], tensor: int, kv_bits: int, kib: float
) -> None:
    one = shape(config)
    assert one.layers * kv_bytes_per_token(one, tensor, kv_bits) == kib * 1024


def test_layers_with_a_window_keep_the_window_and_a_block() -> None:
    one = shape(GPT_OSS_120B)
    token = kv_bytes_per_token(one, 1, 16)
    assert kv_bytes_per_sequence(one, range(36), 8192, 1, 16, 16) == 18 * (8192 + 128 + 16) * token
    assert kv_bytes_per_sequence(one, range(36), 100, 1, 16, 16) == 36 * 112 * token


@pytest.mark.parametrize(
    ("more", "full"),
    [
        ({}, 32),
        ({"sliding_window": 4096}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 32),
        ({"sliding_window": 4096, "model_type": "qwen2", "max_window_layers": 28}, 28),
        ({"sliding_window": 4096, "model_type": "gemma2"}, 16),
        ({"sliding_window": 4096, "model_type": "gemma3_text"}, 5),
        ({"sliding_window": 4096, "sliding_window_pattern": 4}, 8),
        ({"layer_types": ["full_attention", "chunked_attention"] * 16, "attention_chunk_size": 8192}, 16),
    ],
)
def test_which_layers_have_a_window(more: dict[str, Any], full: int) -> None:
    windows = shape(LLAMA_8B, **more).windows
    assert (len(windows), windows.count(None)) == (32, full)


GROUPS = {"group_0": {"weights": {"num_bits": 8}}}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, 8),
    ],
)
def test_quantized_weights(quantization: dict[str, Any], bits: float) -> None:
    assert shape(LLAMA_8B, quantization_config=quantization).weight_bits == bits


def test_a_plan_of_llama_70b_on_eight_devices_of_80_gib() -> None:
    """Stages share all layers, and the tables are at the ends."""
    one = shape(LLAMA_70B)
    parts = stages(80, 3)
    assert [len(part) for part in parts] == [26, 27, 27]
    whole = weight_bytes(one, range(80), 8)
    assert sum(weight_bytes(one, part, 8) for part in parts) == pytest.approx(whole)
    tied = shape(LLAMA_70B, tie_word_embeddings=True)
    table = 128256 * 8192 * 2
    # On one device a tied table is there once, at both ends of a pipeline twice.
    assert weight_bytes(one, range(80), 1) - weight_bytes(tied, range(80), 1) == table
    assert sum(weight_bytes(tied, part, 1) for part in parts) == pytest.approx(
        weight_bytes(one, range(80), 1)
    )
    made = plan_memory(shape(LLAMA_70B), Devices(80 * GIB, tensor=8), Workload(context=4096))
    # 72 GiB usable, 2 reserved, 131.4 / 8 of weights; 40 KiB a token.
    assert made.weight_bytes / GIB == pytest.approx(131.42 / 8, rel=0.001)
    assert made.tokens == pytest.approx((72 - 2 - 131.42 / 8) * GIB / (40 * 1024), rel=0.001)
    assert (made.sequences, made.max_in_flight, made.weight) == (342, 256, 1.4)
    assert not plan_memory(shape(LLAMA_70B), Devices(80 * GIB), Workload()).fits


def run(tmp_path: Path, config: dict[str, Any], *flags: str) -> int:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return main.main(["plan", str(file), *flags])


def test_it_says_what_fits_and_what_to_configure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that does not fit fails and says by how much; the size of the files wins over what is reckoned."""
    assert run(tmp_path, LLAMA_70B, "--memory", "80GiB", "--tensor-parallel-size", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model     llama of 70.55e9 parameters, 80 layers, 8 of 64 heads cached")
    assert lines[-1] == "configure max_in_flight: 256, weight: 1.4"
    assert run(tmp_path, LLAMA_70B, "--memory", "80GiB") == 1
    assert "needs 62.7 GiB more on each device" in capsys.readouterr().out
    (tmp_path / plan.INDEX).write_text(json.dumps({"metadata": {"total_size": 20 * GIB}}))
    assert run(tmp_path, LLAMA_8B, "--memory", "80GiB") == 0
    assert f"20.0 GiB a device (as {plan.INDEX} says)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing (how many layers)"),
        ({"vocab_size": "many"}, "vocab_size: expected a whole number above 0, found 'many'"),
        ({"torch_dtype": "int3"}, "dtype: int3 is not known here"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method: magic is not known here"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits is missing"),
        ({"quantization_config": "awq"}, "quantization_config: expected an object"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types: linear_attention: what such layers take"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    assert run(tmp_path, LLAMA_8B | change, "--memory", "80GiB") == 2
    assert f"{tmp_path}/config.json: " in (err := capsys.readouterr().err)
    assert said in err


def test_all_that_is_missing_is_named_at_once_and_a_language_model_is_found_in_one_that_sees() -> None:
    with pytest.raises(ConfigError) as raised:
        read_shape({})
    assert len(raised.value.problems) == 5
    inside = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    one = shape({"model_type": "llava", "torch_dtype": "float32", "text_config": inside})
    # Engines read float32 as 16 bits.
    assert (one.kind, one.layers, one.dtype_bits, one.file_bits) == ("llama", 32, 16, 32)


OF_NODES = "--nodes f"


@pytest.mark.parametrize(
    "words",
    [
        *(f"m {memory}" for memory in ("--memory much", "--memory -1GiB", "--memory nanGiB", "")),
        *(OF_NODES, f"m {OF_NODES} --size 2", f"{OF_NODES} --size 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Nodes go with a size and without a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").write_text(json.dumps(LLAMA_8B))
    with pytest.raises(SystemExit) as raised:
        main.main(["plan", *words.split()])
    assert raised.value.code == 2


PAGE = """
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",engine="0"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="500",engine="1"} 1
"""


def test_a_model_of_the_hub_cache_is_found_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--llama"
    for commit, layers in (("old", 1), ("new", 32)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        config = LLAMA_8B | {"num_hidden_layers": layers}
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("new")
    assert main.main(["plan", "org/llama", "--memory", "80GiB"]) == 0
    assert ", 32 layers, " in capsys.readouterr().out
    assert main.main(["plan", "org/other", "--memory", "80GiB"]) == 2
    assert f"org/other: neither a file nor in the hub cache {tmp_path}; download" in capsys.readouterr().err
    assert capacity.hub({"HF_HUB_CACHE": "/c"}) == Path("/c")
    assert capacity.hub({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/h/hub")
    assert capacity.hub({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert capacity.hub({}) == Path.home() / ".cache" / "huggingface" / "hub"
    assert capacity.snapshot("../etc/passwd", {"HF_HUB_CACHE": "/"}) is None


def test_a_live_unit_tells_of_all_its_engines() -> None:
    live = read_cache(text_string_to_metric_families(PAGE), "here")
    assert (live, live.tokens) == (LiveCache(16, 1500, 2), 24_000)
    page = "".join(
        f'sglang:{name}{{dp_rank="{dp}",model_name="m",tp_rank="{tp}"}} {value}\n'
        for name, value in (("page_size", 64.0), ("num_pages", 10.0))
        for dp, tp in ((0, 0), (0, 1), (1, 2), (1, 3))
    )
    live = read_cache(text_string_to_metric_families(page), "here")
    assert (live, live.tokens) == (LiveCache(64, 20, 2), 1280)
    with pytest.raises(LiveError, match="here has none of vllm:cache_config_info"):
        read_cache(text_string_to_metric_families("up 1\n"), "here")


def test_a_live_unit_is_set_beside_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer is named after it."""
    flags = ("--memory", "80GiB", "--tensor-parallel-size", "8", "--unit", "http://127.0.0.1:1")
    assert run(tmp_path, LLAMA_70B, *flags) == 1
    captured = capsys.readouterr()
    assert "configure max_in_flight" in captured.out
    assert "nothing answers at http://127.0.0.1:1/metrics" in captured.err
    for blocks, said in ((1_404_390 // 16, "as planned, within 5%"), (43_887, "0.50 x the plan")):
        monkeypatch.setattr(plan, "ask_cache", lambda _url, blocks=blocks: LiveCache(16, blocks, 1))
        assert run(tmp_path, LLAMA_70B, *flags) == 0
        assert said in capsys.readouterr().out.splitlines()[-1]


# Units from free nodes: the least span there is, whatever the network looks like.


def nodes(*places: str) -> list[PlacedNode]:
    return [PlacedNode(f"n{at}", tuple(place.split("/"))) for at, place in enumerate(places)]


def network(rng: random.Random, count: int, zones: int, spines: int, leaves: int) -> list[PlacedNode]:
    def place() -> tuple[str, ...]:
        zone, spine, leaf = rng.randrange(zones), rng.randrange(spines), rng.randrange(leaves)
        return f"z{zone}", f"z{zone}s{spine}", f"z{zone}s{spine}l{leaf}"

    return [PlacedNode(f"n{at:04d}", place()) for at in range(count)]


def least_span(free: list[PlacedNode], size: int) -> int:
    """A bound that needs no pairing: of the units under a switch, those that are under none of its children
    span at least its layer.
    """
    depth, total, narrower = len(free[0].place) if free else 0, 0, 0
    for span in range(depth + 1):
        counts = Counter(node.place[: depth - span] for node in free)
        here = sum(count // size for count in counts.values())
        total += span * (here - narrower)
        narrower = here
    return total


def brute(free: list[PlacedNode], size: int) -> int:
    """The least span of all ways to make as many units as there can be."""
    if len(free) < size:
        return 0
    best = 10**9
    first, rest = free[0], free[1:]
    for others in itertools.combinations(rest, size - 1):
        unit = (first, *others)
        depth = len(first.place)
        shared = next((at for at in range(depth) if len({node.place[at] for node in unit}) > 1), depth)
        left = [node for node in rest if node not in others]
        best = min(best, depth - shared + brute(left, size))
    if len(free) % size:
        best = min(best, brute(rest, size))
    return best


def test_nodes_under_one_switch_are_one_unit() -> None:
    """What is over meets under the next wider one, and rests that make a unit together do."""
    found = pair(nodes("z/a", "z/b", "z/a", "z/b"), 2)
    assert [(unit.nodes, unit.span) for unit in found.units] == [(("n0", "n2"), 0), (("n1", "n3"), 0)]
    assert found.over == ()
    found = pair(nodes("z/a", "z/a", "z/a", "z/b", "y/c"), 2)
    assert [(unit.nodes, unit.under, unit.span, unit.groups) for unit in found.units] == [
        (("n0", "n1"), ("z", "a"), 0, 1),
        (("n2", "n3"), ("z",), 1, 2),
    ]
    assert found.over == ("n4",)
    found = pair(nodes("z/a", "z/a", "z/a", "z/b", "z/b", "z/c", "z/d", "z/d"), 4)
    assert sorted(unit.groups for unit in found.units) == [2, 2]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_spans_less(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 3])
    free = network(rng, rng.randint(size, 7), 2, 2, 2)
    found = pair(free, size)
    assert found.span == least_span(free, size) == brute(free, size)
    paired = [*itertools.chain(*(unit.nodes for unit in found.units)), *found.over]
    assert sorted(paired) == sorted(node.name for node in free)


@pytest.mark.alone
def test_a_thousand_nodes_are_paired_at_the_bound_within_two_seconds() -> None:
    free = network(random.Random(1), 1000, 3, 8, 12)
    began_at = time.process_time()
    found = pair(free, 4)
    assert time.process_time() - began_at < 2.0
    assert len(found.units) == 250
    assert found.span == least_span(free, 4)


def test_places_of_different_depths_and_a_node_that_is_there_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="node n1 has 1 layers and node n0 has 2"):
        pair(nodes("z/a", "z"), 2)
    with pytest.raises(ValueError, match="node n0 is there twice"):
        pair([PlacedNode("n0", ("a",))] * 2, 2)
