"""A new incarnation may be another build."""

from __future__ import annotations

import asyncio

from cellgate.router.nouns import Verdict
from tests.unit.control.test_prober import Scene


def test_the_version_of_a_new_incarnation_is_asked_for_soon() -> None:
    """Only a unit whose build is known may resume streams; usually it is asked for once a minute."""

    scene = Scene()

    def version() -> str:
        return scene.board.units["a"].build.version

    async def scenario() -> None:
        scene.board.units["a"].engine = "vllm"
        await asyncio.sleep(5.0)
        assert version() == "0.32.0"
        scene.engines["a"].epoch = 2
        await scene.until("a", Verdict.STARTING, within_s=1.5)
        assert not version()
        await scene.until("a", Verdict.UP, within_s=1.0)
        scene.board.units["a"].engine = "vllm"
        await asyncio.sleep(1.2)
        assert version() == "0.32.0"

    scene.play(scenario())
