"""All abuses. To add one: a function in the file of its kind, and its row there."""

from __future__ import annotations

from loadtests.abuse.admin import ADMIN
from loadtests.abuse.bodies import BODIES
from loadtests.abuse.connections import CONNECTIONS
from loadtests.abuse.extras import EXTRAS
from loadtests.abuse.heads import HEADS
from loadtests.abuse.names import NAMES
from loadtests.abuse.nouns import Abuse
from loadtests.abuse.payers import PAYERS
from loadtests.abuse.streams import REPLIES, STREAMS
from loadtests.abuse.uploads import UPLOADS

CATALOG: tuple[Abuse, ...] = (
    *HEADS,
    *BODIES,
    *UPLOADS,
    *PAYERS,
    *CONNECTIONS,
    *NAMES,
    *STREAMS,
    *REPLIES,
    *ADMIN,
    *EXTRAS,
)
