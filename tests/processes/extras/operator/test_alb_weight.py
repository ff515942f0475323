"""A real gate and a load balancer's API: moto's, as a server that boto3 asks over HTTP."""

from __future__ import annotations

from functools import partial

import pytest
from moto.server import ThreadedMotoServer

from cellgate.proxy.ingress.haproxy import STEADY
from loadtests.kit.gate import GateProcess, Program
from loadtests.kit.waiting import wait_until
from loadtests.simunit.process import sim_units
from tests.aws import REGION, make_balancer, pretend_credentials
from tests.wire.process import program_after

PATIENCE_S = 60.0
OFTEN = Program(tuple(program_after("from cellgate.extras.operator import alb; alb.PERIOD_S = 0.5")))


def test_a_cell_that_loses_units_loses_weight_and_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        pretend_credentials(monkeypatch)
        _play()
    finally:
        server.stop()


def _play() -> None:
    balancer = make_balancer()
    alb = {"rule": balancer.listener, "target_group": balancer.own, "region": REGION}
    settings = {"rules": {"slow_start_s": 1}}
    operator = {"alb": alb}

    def has(weight: int) -> bool:
        own, other = balancer.weights(default=True)
        # One that is near stays; all and nothing are exact.
        return other == 100 and abs(own - weight) <= (100 * STEADY if weight == 50 else 0)

    with (
        sim_units(["a1", "a2"], followers=1) as units,
        GateProcess(units, settings=settings, operator=operator, program=OFTEN) as gate,
    ):
        for weight, unit in ((50, units[0]), (0, units[1])):
            unit.kill()
            assert wait_until(partial(has, weight), PATIENCE_S, 0.5), gate.metrics()
        for unit in units:
            unit.restart()
        assert wait_until(lambda: has(100), PATIENCE_S, 0.5), gate.metrics()
        assert "cellgate_alb_weight 100.0" in gate.metrics()
        kinds = [event["kind"] for event in gate.events()]
        assert kinds.count("alb_weight") >= 3
