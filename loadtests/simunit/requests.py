"""What a client may ask: bodies of the OpenAI-compatible API, checked, as a `Generation`. No I/O."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from loadtests.simunit.agents import called, explained
from loadtests.simunit.text import Message, detokenize, render_chat

COMPLETION_MAX_TOKENS = 16
"""What /v1/completions generates when `max_tokens` is left out, as in OpenAI's API."""

TURNS = 10
"""So many turns has a loop with a tool."""

Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""Checked up to the first thing that is wrong: a unit stands still meanwhile."""


class ApiError(Exception):
    """A request that is refused or failed, as it is told to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


class TransferParams(BaseModel):
    """`kv_transfer_params` of vLLM's NixlConnector: keep the blocks of this prompt for another unit, or fetch
    them from where they are.
    """

    model_config = ConfigDict(extra="ignore")

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str = ""
    remote_request_id: str = ""
    remote_host: str = ""
    remote_port: int = 0

    @field_validator("remote_engine_id", "remote_request_id", "remote_host", "remote_port", mode="before")
    @classmethod
    def _null_is_nothing(cls, given: object, info: ValidationInfo) -> object:
        return (0 if info.field_name == "remote_port" else "") if given is None else given


class SamplingBody(BaseModel):
    """What chat and completions have in common. Unknown fields are ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | Listed[str] | None = None
    ignore_eos: bool = False
    n: int | None = 1
    logprobs: bool | int | None = None
    return_token_ids: bool = False
    echo: bool = False
    priority: int = 0
    kv_transfer_params: TransferParams | None = None


class ContentPart(BaseModel):
    """A part of a message's content; only text can be simulated."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One entry of `messages`."""

    role: str
    content: str | Listed[ContentPart] | None = None
    tool_calls: Listed[dict[str, Any]] | None = None

    def flat(self) -> Message:
        """The message with its content as one text."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        functions = [call["function"] for call in self.tool_calls or []]
        calls = [called(function["name"], function["arguments"]) for function in functions]
        return Message(self.role, "".join((text, *calls)))


class ChatPrompt(BaseModel):
    """The fields that the chat template reads."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Listed[dict[str, Any]] = []

    def render(self) -> str:
        """The prompt's text. Raises ApiError for flags that contradict each other."""
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(400, "continue_final_message needs add_generation_prompt to be false")
        return explained(self.tools) + render_chat(
            [message.flat() for message in self.messages],
            add_generation_prompt=self.add_generation_prompt,
            continue_final=self.continue_final_message,
        )


class ChatBody(SamplingBody, ChatPrompt):
    """Body of /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionBody(SamplingBody):
    """Body of /v1/completions: one prompt, as text or tokens."""

    prompt: str | Listed[int] | Listed[str]


class BlocksBody(BaseModel):
    """What /v1/messages and /v1/responses have in common; history is read for its texts alone."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool = False
    tools: Listed[dict[str, Any]] = []
    kv_transfer_params: dict[str, Any] = {}

    def messages_read(self) -> list[Message]:
        """The chat that the request stands for."""
        raise NotImplementedError

    def prompt(self) -> str:
        """The prompt's text: of the tokens given in its place, or rendered."""
        if ids := self.kv_transfer_params.get("prompt_token_ids"):
            return detokenize(ids)
        chat = render_chat(self.messages_read(), add_generation_prompt=True, continue_final=False)
        return explained(self.tools) + chat


class MessagesBody(BlocksBody):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    system: str = ""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]

    def messages_read(self) -> list[Message]:
        """Results of tools come before the text, as in vLLM."""
        messages = [Message("system", self.system)] if self.system else []
        for message in self.messages:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            results = [str(block["content"]) for block in blocks if block["type"] == "tool_result"]
            messages += [Message("tool", text) for text in results]
            text = "\n".join(block["text"] for block in blocks if block["type"] == "text")
            calls = [called(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
            if text or calls or not results:
                messages.append(Message(message["role"], "".join((text, *calls))))
        return messages


class ResponsesBody(BlocksBody):
    """Body of /v1/responses."""

    max_output_tokens: Annotated[int, Field(ge=1)] = COMPLETION_MAX_TOKENS
    instructions: str | None = None
    input: str | Listed[dict[str, Any]]

    def messages_read(self) -> list[Message]:
        """A call belongs to the text of the assistant before it, as in vLLM."""
        messages = [Message("system", self.instructions)] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            match item.get("type", "message"):
                case "function_call":
                    if messages[-1].role != "assistant":
                        messages.append(Message("assistant", ""))
                    call = called(item["name"], item["arguments"])
                    messages[-1] = Message("assistant", messages[-1].content + call)
                case "function_call_output":
                    messages.append(Message("tool", str(item["output"])))
                case _:
                    content = item["content"]
                    parts = content if isinstance(content, list) else [{"text": content}]
                    messages.append(Message(item["role"], "\n".join(part["text"] for part in parts)))
        return messages


class EmbeddingBody(BaseModel):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=4096)] = 64


class TokenizeBody(ChatPrompt):
    """Body of /tokenize: a plain prompt, or messages as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[ChatMessage] = []
    return_token_strs: bool = False

    def text(self) -> str:
        """The text to count. Raises ApiError when there is none."""
        if self.prompt is None and not self.messages:
            raise ApiError(400, "expected prompt or messages")
        return self.render() if self.prompt is None else self.prompt


class DetokenizeBody(BaseModel):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Listed[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """What is to be generated, whichever API asked. `max_tokens` None: until the text ends by itself."""

    chat: bool
    prompt: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    blocks: str = ""
    """The API that streams blocks, if it is one."""
    tool: str = ""
    """It is called after the text."""
    gives_ids: bool = False
    transfer: TransferParams | None = None
    logprobs: bool = False


def parse(model: type[Body], body: bytes) -> Body:
    """Validate a JSON body. Raises ApiError 400 naming the first thing that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ApiError(400, f"{where}: {first['msg']}") from error


def chat_generation(body: ChatBody) -> Generation:
    """Raises ApiError for what the unit cannot do."""
    return _generation(body, body.render(), body.max_completion_tokens or body.max_tokens, chat=True)


def completion_generation(body: CompletionBody) -> Generation:
    """Raises ApiError for what the unit cannot do."""
    prompts = texts_of(body.prompt)
    if len(prompts) != 1:
        raise ApiError(400, "prompt: the simulated unit takes one prompt a request")
    return _generation(body, prompts[0], body.max_tokens or COMPLETION_MAX_TOKENS, chat=False)


def blocks_generation(body: MessagesBody | ResponsesBody) -> Generation:
    """The answer is as long as it may be; then the first tool is called, in all turns but the tenth."""
    prompt = body.prompt()
    tool = body.tools[0] if body.tools and prompt.count("<|tool|>") + 1 < TURNS else {}
    return Generation(
        chat=False,
        prompt=prompt,
        stream=body.stream,
        include_usage=False,
        max_tokens=body.max_tokens if isinstance(body, MessagesBody) else body.max_output_tokens,
        min_tokens=0,
        blocks="messages" if isinstance(body, MessagesBody) else "responses",
        tool=str(tool.get("name", "")),
    )


def texts_of(given: str | list[int] | list[str] | list[list[int]]) -> list[str]:
    """The texts in a `prompt` or `input`, each of which may be tokens. Raises ApiError for no tokens."""
    is_one = isinstance(given, str) or all(isinstance(item, int) for item in given)
    entries = cast("list[str | list[int]]", [given] if is_one else given)
    try:
        return [entry if isinstance(entry, str) else detokenize(entry) for entry in entries]
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _generation(body: SamplingBody, prompt: str, max_tokens: int | None, *, chat: bool) -> Generation:
    if body.priority != 0:
        raise ApiError(400, f"priority {body.priority}: priority scheduling is not enabled")
    if body.n not in (None, 1):
        raise ApiError(400, f"n={body.n}: the simulated unit gives one choice")
    if body.echo:
        raise ApiError(400, "echo is not simulated")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Generation(
        chat=chat,
        prompt=prompt,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stops=tuple(stop for stop in stops if stop),
        ignore_eos=body.ignore_eos,
        gives_ids=body.return_token_ids,
        transfer=body.kv_transfer_params,
        logprobs=bool(body.logprobs),
    )
