"""What may befall the processes of a simulated unit, by the node (0 is the leader's) that they run on."""

from __future__ import annotations

from tests.sim.engine import Engine


def kill(engine: Engine, rank: int) -> None:
    """SIGKILL."""
    if rank == 0:
        engine.die()
    else:
        engine.nodes[rank].die()
        engine.behaviour.follower_lost = True


def stop(engine: Engine, rank: int) -> None:
    """SIGSTOP."""
    engine.nodes[rank].stop()
    if rank == 0:
        engine.behaviour.silent = True
    else:
        engine.behaviour.wedged = True


def stop_core(engine: Engine) -> None:
    """SIGSTOP to the engine's process beside the leader's front end, which goes on answering."""
    engine.nodes[0].stop()
    engine.behaviour.wedged = True


def go_on(engine: Engine) -> None:
    """SIGCONT to all."""
    for node in engine.nodes:
        node.go_on()
    engine.behaviour.silent = engine.behaviour.wedged = False
