"""What a process of the gate has used once, and needs no more, goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WAVE = """
import sys
from cellgate.proxy.process.malloc import LARGE_BLOCK_BYTES, return_large_blocks

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

if sys.argv[1] == "yes":
    return_large_blocks()
# One block that is freed teaches glibc to keep all of its size.
bytes(20 << 20)
before = resident_mb()
wave, kept = [], []
for _ in range(100):
    wave.append(b"a" * (64 * LARGE_BLOCK_BYTES))
    kept.append(bytearray(3000))
wave.clear()
print(resident_mb() - before)
"""


@pytest.mark.parametrize("returns", ["yes", "no"])
def test_large_blocks_are_returned_though_small_ones_between_them_are_kept(returns: str) -> None:
    command = [sys.executable, "-c", _WAVE, returns]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    kept_mb = float(done.stdout)
    # Without it a wave of 52 MB stays: what the other half of this test shows.
    assert kept_mb < 5.0 if returns == "yes" else kept_mb > 25.0, kept_mb
