"""Where nodes stand, as clouds and clusters tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellgate.proxy.cli.main import main
from cellgate.proxy.extras.planner.topology import SCHEMES, PlacedNode, read_nodes


def test_ec2_tells_network_nodes_from_the_widest_to_the_narrowest() -> None:
    told = {
        "Instances": [
            {
                "InstanceId": "i-1",
                "InstanceType": "trn1.32xlarge",
                "NetworkNodes": ["nn-1", "nn-2", "nn-3"],
                "AvailabilityZone": "us-west-2a",
            }
        ]
    }
    assert read_nodes(json.dumps(told)) == [PlacedNode("i-1", ("nn-1", "nn-2", "nn-3"))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kubernetes_tells_it_by_labels(scheme: str) -> None:
    labels = {label: f"v{at}" for at, label in enumerate(SCHEMES[scheme])} | {"other": "x"}
    told = {"kind": "List", "items": [{"metadata": {"name": "node-1", "labels": labels}}]}
    assert read_nodes(json.dumps(told)) == [
        PlacedNode("node-1", tuple(f"v{at}" for at in range(len(SCHEMES[scheme]))))
    ]


def test_a_list_of_our_own_may_be_yaml() -> None:
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
    assert main(["plan", "--nodes", str(tmp_path / "nodes.json"), "--size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [unit["nodes"] for unit in found["units"]] == [["n0", "n1"], ["n2", "n3"]]
    assert (found["span"], found["over"]) == (0, [])


@pytest.mark.parametrize(
    "words", [["--nodes", "f"], ["m", "--nodes", "f", "--size", "2"], ["--nodes", "f", "--size", "0"]]
)
def test_nodes_go_with_a_size_and_without_a_model(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 2
