"""Keys about the weight of a target group at AWS's Application Load Balancer, and what they have to be."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, PlainValidator

from cellgate.proxy.config import values
from cellgate.proxy.config.alb import AlbTarget
from cellgate.proxy.config.unit_action_keys import installed
from cellgate.proxy.config.units import Keys
from cellgate.proxy.config.word_values import word

WEIGHT_MAX = 999
"""The API's limit."""
_GIVEN = AlbTarget("", "")


def _bounded(weight: int) -> int:
    if weight > WEIGHT_MAX:
        raise ValueError(f"is {weight}, and a load balancer takes 1 to {WEIGHT_MAX}")
    return weight


class AlbKeys(Keys):
    """Where the weight of this gate is set."""

    rule: Annotated[str, PlainValidator(word("the ARN of a rule or a listener"))]
    target_group: Annotated[str, PlainValidator(word("the ARN of a target group"))]
    weight: Annotated[int, PlainValidator(values.count), AfterValidator(_bounded)] = _GIVEN.weight
    region: Annotated[str, PlainValidator(word("the name of a region"))] = _GIVEN.region


def alb_target(found: object) -> AlbTarget:
    """The target that a mapping makes."""
    keys = AlbKeys.model_validate(found)
    if not re.match(r"arn:\S+:listener(-rule)?/app/", keys.rule):
        raise ValueError(f"rule is {keys.rule!r}, not the ARN of a rule or a listener of an ALB")
    if ":targetgroup/" not in keys.target_group:
        raise ValueError(f"target_group is {keys.target_group!r}, not the ARN of a target group")
    installed("alb", "ecs")
    return AlbTarget(**dict(keys))
