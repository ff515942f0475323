"""What the requests of a worker use, sent to the ledger at the control process."""

from __future__ import annotations

from cellgate.proxy.doors.bill import Bill
from cellgate.proxy.workers.control_client import ControlClient
from cellgate.proxy.workers.protocol import ToControl


class RemoteAccounts:
    """Of one worker."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        """The answer of a request in flight has so many tokens more than it was charged with."""
        self._control.mention((ToControl.SPENT, key, tenant, model, tokens))

    def settle(self, bill: Bill) -> None:
        """A request that was charged is over."""
        self._control.mention((ToControl.SETTLED, *bill))

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused at the door: of this limit nothing is left."""
        self._control.mention((ToControl.REFUSED, tenant, limit))
