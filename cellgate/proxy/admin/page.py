"""The status page: page.html unchanged, with a Content-Security-Policy.

The page holds no data and loads nothing from elsewhere. A browser knows its one script and one style by their
hashes: text from outside could not run even if it became HTML.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from cellgate.proxy.ingress.envoy_health import HeaderPairs

_INLINE = r"<{0}>(.*?)</{0}>"


def load_page() -> tuple[bytes, HeaderPairs]:
    """The page's bytes and the headers that go with them."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return text.encode(), (
        ("Content-Security-Policy", policy),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
    )


def _hash(text: str, tag: str) -> str:
    """The source expression of CSP Level 3 for the one inline element of that tag."""
    (inside,) = re.findall(_INLINE.format(tag), text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"
