"""The gate, which splits every request that it can: on this machine's CPU a transfer never pays.

It shows that both legs work with real engines, not when they are worth it.
"""

import sys

from cellgate.proxy.cli.commands import main
from cellgate.router import pairs

if __name__ == "__main__":
    pairs.PAYS = float("inf")
    sys.exit(main())
