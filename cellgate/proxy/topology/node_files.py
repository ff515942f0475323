"""Reads where nodes stand: from EC2's DescribeInstanceTopology, from Kubernetes, or from a list of our own.

- EC2: `{"Instances": [{"InstanceId", "NetworkNodes": [widest, …, narrowest]}]}`
  (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceTopology.html);
- Kubernetes: `kubectl get nodes -o json`, with the labels of one of the schemes in SCHEMES;
- a list: `[{"name", "place": [widest, …, narrowest]}]`, JSON or YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from cellgate.proxy.topology.pairing import PlacedNode
from cellgate.router.nouns import Place

SCHEMES: Mapping[str, Sequence[str]] = {
    "EKS, four layers": tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3, 4)),
    "EKS": tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3)),
    "Topograph": tuple(f"fabric.topograph.run/tier-{tier}" for tier in (2, 1, 0)),
    "Topograph 0": tuple(f"network.topology.nvidia.com/{layer}" for layer in ("core", "spine", "leaf")),
    "GKE": tuple(f"cloud.google.com/gce-topology-{layer}" for layer in ("block", "subblock", "host")),
    "zones": ("topology.kubernetes.io/region", "topology.kubernetes.io/zone"),
}
"""Labels of nodes, from the widest layer to the narrowest, the most exact scheme first."""
_FORMS = (
    "the JSON of DescribeInstanceTopology, that of `kubectl get nodes -o json`, or a list of {name, place}"
)


def read_nodes(text: str) -> list[PlacedNode]:
    """The nodes in a file. Raises ValueError with one line that says what to do."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"it is neither JSON nor YAML ({str(error).splitlines()[0]}): give {_FORMS}"
        ) from None
    try:
        if isinstance(found, dict) and "Instances" in found:
            return [_node(each["InstanceId"], each["NetworkNodes"]) for each in found["Instances"]]
        if isinstance(found, dict) and "items" in found:
            labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in found["items"]}
            return [PlacedNode(name, place) for name, place in places_by_labels(labels).items()]
        if isinstance(found, list):
            return [_node(each["name"], each["place"]) for each in found]
    except (TypeError, KeyError) as error:
        raise ValueError(f"an entry lacks {error}: give {_FORMS}") from None
    raise ValueError(f"it is no list of nodes: give {_FORMS}")


def places_by_labels(labels: Mapping[str, Mapping[str, str]]) -> dict[str, Place]:
    """The places of nodes, by name, from their labels. Raises ValueError when they have no common scheme."""
    for scheme in SCHEMES.values():
        if labels and all(label in of_node for of_node in labels.values() for label in scheme):
            return {name: tuple(of_node[label] for label in scheme) for name, of_node in labels.items()}
    known = "; ".join(", ".join(scheme) for scheme in SCHEMES.values())
    raise ValueError(f"not all nodes have the labels of one scheme: {known}")


def _node(name: object, place: object) -> PlacedNode:
    if (
        not isinstance(name, str)
        or not isinstance(place, list)
        or not all(isinstance(at, str) for at in place)
    ):
        raise TypeError(f"a name and a place of strings: {name!r}, {place!r}")
    return PlacedNode(name, tuple(place))
