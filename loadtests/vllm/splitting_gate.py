"""The gate, which splits every request that it can: on this machine's CPU a transfer never pays.

It shows that both legs work with real engines, not when they are worth it.
"""

import sys

from cellgate.proxy.cli.main import main
from cellgate.router import prefill_decode

if __name__ == "__main__":
    prefill_decode.PAYS = float("inf")
    sys.exit(main())
