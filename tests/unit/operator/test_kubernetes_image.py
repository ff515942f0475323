"""What a set is changed to so that one of its groups gets another image."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.config.action_settings import SetImage
from cellgate.proxy.extras.operator.kubernetes import rolled


@pytest.mark.parametrize("strategy", [None, {"type": "RollingUpdate", "rollingUpdateConfiguration": None}])
def test_fields_that_are_null_are_as_if_they_were_not_there(strategy: dict[str, Any] | None) -> None:
    template = {"metadata": {"annotations": None}, "spec": {"containers": [{"name": "e", "image": "old"}]}}
    spec = {"leaderWorkerTemplate": {"workerTemplate": template}, "rolloutStrategy": strategy}
    after = rolled({"spec": spec}, [], SetImage("new"), 2)["spec"]
    assert after["rolloutStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"partition": 2},
    }
    assert after["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["image"] == "new"
