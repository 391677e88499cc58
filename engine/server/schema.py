"""What a client may ask for. Fields not defined here, or that this engine cannot honour, are refused by name.

Names and defaults are OpenAI's; those below "beyond OpenAI" are vLLM's where vLLM has one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from engine.core.params import LONGEST_STOP, MOST_STOPS
from engine.server.body import Body, Ignored, SentBack
from engine.server.tools.schema import AllowedTools, AskedCall, AskedTool, AskedToolChoice, NamedTool
from engine.text.chat import Rendering

Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class TextPart(Body):
    """A part of a message. Pictures and sound are not supported."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = False


_AS_THEY_ARE = ("name", "tool_call_id", "reasoning_content")


class AskedMessage(Body):
    """A chat message. `developer` is the newer name of `system`. content: of an answer it may be missing, null or an
    empty list. name: who wrote it; templates may use it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[AskedCall] | None = Field(None, description="Of the assistant: what it has called.")
    tool_call_id: str | None = Field(None, description="Of a tool: the call that this is the result of.")
    reasoning_content: str | None = Field(None, description="Of the assistant, for templates that show it.")
    parsed: SentBack = False
    cache_control: Ignored = False
    provider_specific_fields: Ignored = Field(False, description="LiteLLM's, of an answer that it had before.")

    @model_validator(mode="after")
    def _says_something(self) -> AskedMessage:
        if self.content in (None, []) and self.role != "assistant":
            raise ValueError("content: is missing; give a text, or text parts")
        for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) is not None and self.role != role:
                raise ValueError(f"{field}: is of messages with the role {role!r}; leave it out")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it: arguments of calls are objects."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        plain |= {name: value for name in _AS_THEY_ARE if (value := getattr(self, name)) is not None}
        return plain | ({"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {})


class StreamOptions(Body):
    """What a stream sends besides the answer. include_usage: one more chunk at the end, without choices, that counts
    tokens. continuous_usage_stats: every chunk counts those so far, as vLLM's do.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """The schema that an answer must follow. strict: whether it is refused if a grammar cannot follow all of it."""

    name: str = Field("answer", min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """What an answer must be, with vLLM's names: one of a JSON schema, a regular expression, a choice or a grammar."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("give exactly one of json, regex, choice and grammar")
        return self


class SpeculationFields(Body):
    """Drafting options of this request. off: plain decoding. budget: maximum nodes of a tree. The text is the same."""

    off: bool = False
    budget: int | None = Field(None, ge=2, le=1024)


class Generation(Body):
    """The fields that chat and text completions have in common."""

    model: str = Field("", description="Without a name, the model that is served.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1, description="0 is greedy.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = Field(
        None, description=f"At most {MOST_STOPS} texts of at most {LONGEST_STOP} characters."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100, strict=True)]]
        | None
    ) = None
    user: str | None = Field(None, max_length=512, description="Stands in the log; nothing else depends on it.")

    # Without effect.
    cache_prompt: Ignored = False
    id_slot: Ignored = False
    metadata: Ignored = False
    prompt_cache_key: Ignored = False
    prompt_cache_retention: Ignored = False
    reasoning_effort: Ignored = False
    response_fields: Ignored = False
    safety_identifier: Ignored = False
    samplers: Ignored = False
    service_tier: Ignored = False
    timings_per_token: Ignored = False
    verbosity: Ignored = False

    # Beyond OpenAI.
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    stop_token_ids: list[Token] | None = Field(None, description="Tokens that end the answer, as its end token does.")
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    speculation: SpeculationFields | None = None
    return_progress: bool = Field(
        False,
        description="Say in a stream how far a long prompt is, as `prompt_progress` of a chunk, as llama.cpp does.",
    )
    return_sources: bool = Field(False, description="Say of each token who proposed it, as `sources` of its choice.")

    @field_validator("top_k")
    @classmethod
    def _minus_one_is_off(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value

    @property
    def ignored(self) -> list[str]:
        idle = ["stream_options"] if self.stream_options is not None and not self.stream else []
        return sorted([*super().ignored, *idle])

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_throughout(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class _Templated(Body):
    """How messages become a prompt, with vLLM's names. The last message is finished, whoever wrote it, and a new answer
    begins after it; with continue_final_message the answer continues it.
    """

    add_generation_prompt: bool | None = Field(None, description="Begin an answer: true unless one is continued.")
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )

    @model_validator(mode="after")
    def _begins_or_continues(self) -> _Templated:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message: add_generation_prompt begins another answer; give one of them")
        return self

    @property
    def rendering(self) -> Rendering:
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return Rendering(opens, self.continue_final_message, self.chat_template_kwargs or {})


_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
"""Names of the limit of an answer's tokens."""
_CHOSEN = {"function": "tool_choice.function.name", "allowed_tools": "tool_choice.allowed_tools.tools"}


class ChatRequest(Generation, _Templated):
    """POST /v1/chat/completions. Without a limit an answer may take the rest of the context."""

    messages: Annotated[list[AskedMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=-1, description="-1 is the rest of the context.")
    max_tokens: int | None = Field(None, ge=-1, description="The older name of max_completion_tokens.")
    n_predict: int | None = Field(
        None, ge=-1, description="llama.cpp's name of max_completion_tokens. 0 asks for one token too."
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[AskedTool], Field(min_length=1, max_length=512)] | None = None
    tool_choice: AskedToolChoice | None = Field(
        None, description="Without it an answer may call tools or not, as with `auto`."
    )
    parallel_tool_calls: bool = Field(True, description="Whether an answer may have more than one call.")

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _is_not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("should be at least 1, or -1 for the rest of the context")
        return value

    @field_validator(*_LIMITS)
    @classmethod
    def _minus_one_is_the_rest(cls, value: int | None) -> int | None:
        return None if value == -1 else value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true")
        if len({getattr(self, name) for name in _LIMITS} - {None}) > 1:
            raise ValueError("max_tokens: is another name of max_completion_tokens and n_predict; give one of them")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: response_format is given too; give one of them")
        if self.tools is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: tools are given too; give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"tools: has {twice!r} twice; name each tool once")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice: needs tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool | AllowedTools) and (unknown := sorted(self.callable_tools - {*names})):
            raise ValueError(f"{_CHOSEN[choice.type]}: {unknown[0][:64]!r} is none of the tools {names[:8]}")
        return self

    @property
    def callable_tools(self) -> set[str]:
        """The names of the tools that the answer may call."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return {choice.function.name}
        if isinstance(choice, AllowedTools):
            return {tool.function.name for tool in choice.allowed_tools.tools}
        return set() if choice == "none" else {tool.function.name for tool in self.tools or ()}

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call a tool."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def limit_name(self) -> str:
        """The field that limits the answer's tokens, by the name that the client uses."""
        return next((name for name in _LIMITS if getattr(self, name) is not None), "max_tokens")

    @property
    def limit(self) -> int | None:
        limit: int | None = getattr(self, self.limit_name)
        return limit


Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


class CompletionRequest(Generation):
    """POST /v1/completions. The prompt goes in as it is, without a chat template; a list of prompts is a batch."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    max_tokens: int = Field(
        16, ge=-1, description="0 is for echo: only the prompt comes back. -1 is the rest of the context."
    )
    suffix: str | None = Field(None, description="Text after the cursor: the answer fills in what is between.")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _fills_in_texts(self) -> CompletionRequest:
        if self.suffix is not None and self.echo:
            raise ValueError("echo: cannot be with a suffix; leave one of them out")
        if self.suffix is not None and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError("suffix: needs a prompt that is text")
        return self

    @model_validator(mode="after")
    def _asks_for_something(self) -> CompletionRequest:
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens: 0 is for echo=true; ask for at least one token")
        return self

    @property
    def limit(self) -> int | None:
        return None if self.max_tokens == -1 else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TokenizeRequest(_Templated):
    """POST /tokenize: a text as it is, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[AskedMessage], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    tools: Annotated[list[AskedTool], Field(min_length=1, max_length=512)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools: need messages")
        return self
