"""A real nginx with the project's configuration."""

from __future__ import annotations

from pathlib import Path

from tests.real.asking import get, post, until
from tests.real.nginx import nginx
from tests.real.programs import free_port
from tests.real.tiny_gate import TinyGate, listening
from tests.wire.stage import live


@live
async def test_nginx_passes_a_gate_that_refuses(tmp_path: Path) -> None:
    one, other = TinyGate(), TinyGate()
    async with listening(one, other):
        refusing = free_port()
        with nginx(tmp_path, [one.port, other.port]) as port:

            async def answers() -> bool:
                return (await get(port, "/readyz"))[0] == 200

            await until(answers)
            assert [await post(port) for _ in range(10)] == [200] * 10
            assert one.served
            assert other.served
        with nginx(tmp_path, [one.port, refusing]) as port:
            await until(answers)
            served = one.served
            assert [await post(port) for _ in range(10)] == [200] * 10
            assert one.served == served + 10
