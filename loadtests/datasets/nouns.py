"""What a file of requests holds."""

from dataclasses import dataclass


class DatasetError(Exception):
    """A file that cannot be used: its name, the place and the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes, in seconds after the start (0 where the file has no times), and how long
    its prompt and its answer are, in tokens. `blocks`: ids of its blocks of text, where the file has them;
    `text`: the prompt, where the file has it.
    """

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    text: str = ""
