"""A follower process: computes its part of each step, which is to take the step's time, and answers.

What must stay true: it never outlives its leader, not even stopped (the kernel kills it with its parent) or
spinning; and it imports little, since several are started at once.
"""

import argparse
import contextlib
import ctypes
import enum
import os
import signal
import socket
import struct
import time

MESSAGE = struct.Struct("!cIf")
"""Leader to follower: operation, step number, seconds to compute."""

REPLY = struct.Struct("!I")
"""Follower to leader: the number of the step that is done."""

HELLO = struct.Struct("!I")
"""A follower's first words: its rank."""

_PR_SET_PDEATHSIG = 1


class Op(enum.Enum):
    """What a leader can ask for."""

    STEP = b"s"
    SPIN = b"p"
    REST = b"r"


def run_follower(rank: int, leader_port: int) -> None:
    """Serve the leader that listens on `leader_port` until it goes away."""
    _die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the leader decides when to end.
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", leader_port)) as leader:
        leader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        leader.sendall(HELLO.pack(rank))
        while len(message := leader.recv(MESSAGE.size, socket.MSG_WAITALL)) == MESSAGE.size:
            op, step, seconds = MESSAGE.unpack(message)
            if op == Op.STEP.value:
                time.sleep(max(0.0, seconds))
                leader.sendall(REPLY.pack(step))
            elif op == Op.SPIN.value:
                _spin_until_rest(leader)


def _spin_until_rest(leader: socket.socket) -> None:
    """Burn the processor as a hung collective does, reading nothing; steps that arrive wait in the socket."""
    while True:
        try:
            waiting = leader.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        operations = [waiting[at : at + 1] for at in range(0, len(waiting), MESSAGE.size)]
        if not waiting or Op.REST.value in operations:
            return


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the leader dies; it takes effect on a stopped process too."""
    leader_pid = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader_pid:
        raise SystemExit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadtests.simunit.follower", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--leader-port", type=int, required=True)
    run_follower(**vars(parser.parse_args()))
