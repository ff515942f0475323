"""Whether the beginning of an answer shows that anything was generated. Pure.

A decoder that could not fetch the blocks of a prompt may say 200, and nothing: a role, an end, no token.
"""

from __future__ import annotations

import re

# The fields of OpenAI's API that carry what was generated, with something in them.
_SHOWN = re.compile(
    rb'"(?:content|text|refusal|reasoning|reasoning_content|arguments)"\s*:\s*"(?!")'
    rb'|"tool_calls"\s*:\s*\[\s*\{'
    rb'|"completion_tokens"\s*:\s*[1-9]'
)


def shows_token(answer: bytes) -> bool:
    """True for text, reasoning or a tool call, and for a count of tokens: the only one may be the end."""
    return _SHOWN.search(answer) is not None
