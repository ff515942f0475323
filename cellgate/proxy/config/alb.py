"""The weight of a target group at AWS's Application Load Balancer, as it is configured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlbTarget:
    """The target group of this gate in a rule of a load balancer, both by ARN.

    `rule` is one of a listener, or a listener, for its default action. weight (100): what the group has while
    all units are usable. `region` empty: as boto3 finds it.
    """

    rule: str
    target_group: str
    weight: int = 100
    region: str = ""
