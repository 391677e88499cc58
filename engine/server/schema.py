"""What a client may ask for. Fields not defined here, or that this engine cannot honour, are refused by name.

Names and defaults are OpenAI's; those below "beyond OpenAI" are vLLM's where vLLM has one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from engine.core.characters import HALF_A_CHARACTER, is_text
from engine.core.params import LONGEST_STOP, MOST_STOPS
from engine.text.chat import Rendering

Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_ABSENT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
    "annotations": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "include_obfuscation": (False,),
    "logprobs": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
}
"""Fields, and their values that ask for nothing."""
Ignored = Annotated[bool, BeforeValidator(lambda _: True, json_schema_input_type=Any)]
"""A field that clients send and that changes no answer here. Of its value only that there is one is kept."""
_IGNORED = (
    "cache_control",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "provider_specific_fields",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "verbosity",
)


@lru_cache
def _numbers(body: type[BaseModel]) -> frozenset[str]:
    """The fields that hold numbers."""
    kinds = {name: {field.annotation, *get_args(field.annotation)} for name, field in body.model_fields.items()}
    return frozenset(name for name, kind in kinds.items() if kind & {int, float})


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        """Clients send null for fields they leave open, and empty lists of tools."""
        if not isinstance(values, dict):
            return values
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        idle = {key for key, value in values.items() if any(_same(value, one) for one in _ABSENT.get(key, ()))}
        idle |= {key for key in values.keys() - needed if values[key] is None}
        asked = {key: value for key, value in values.items() if key not in idle}
        for key in _numbers(cls) & asked.keys():
            if isinstance(asked[key], bool):  # to pydantic true is 1, as to Python
                raise ValueError(f"{key}: should be a number; {str(asked[key]).lower()} is none")
        return asked

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """JSON can hold half a character. JSON schemas are left to the grammar's library, which refuses it too."""
        texts = value if isinstance(value, list) else [value]
        if not all(is_text(text) for text in texts if isinstance(text, str)):
            raise ValueError(HALF_A_CHARACTER)
        return value

    @property
    def ignored(self) -> list[str]:
        """The fields sent, here and in the messages, that have no effect."""
        names = {name for name in _IGNORED if getattr(self, name, False)}
        for value in (getattr(self, name) for name in self.model_fields_set):
            if isinstance(value, list) and value and isinstance(value[0], _Body):
                names |= {name for part in value for name in part.ignored}
        return sorted(names)


class TextPart(_Body):
    """A part of a message. Pictures and sound are not supported."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = False


class AskedMessage(_Body):
    """A chat message. `developer` is the newer name of `system`. content: of an answer it may be missing, null or
    an empty list. name: of who wrote it; templates may use it.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    cache_control: Ignored = False
    provider_specific_fields: Ignored = Field(False, description="LiteLLM's, of an answer that it had before.")

    @model_validator(mode="after")
    def _says_something(self) -> AskedMessage:
        if self.content in (None, []) and self.role != "assistant":
            raise ValueError("content: is missing; give a text, or text parts")
        return self

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        plain = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return plain if self.name is None else plain | {"name": self.name}


class StreamOptions(_Body):
    """include_usage: one more chunk at the end, without choices, that counts tokens. continuous_usage_stats: every
    chunk counts those so far, as vLLM's do.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Body):
    """The schema that an answer must follow. It is always followed strictly."""

    name: str = Field("answer", min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(_Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(_Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(_Body):
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


class SpeculationFields(_Body):
    """Drafting options of this request. off: plain decoding. budget: maximum nodes of a tree. The text is the same."""

    off: bool = False
    budget: int | None = Field(None, ge=2, le=1024)
    method: str | None = None


class Generation(_Body):
    """What chat and text completions have in common."""

    model: str
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
    metadata: Ignored = False
    parallel_tool_calls: Ignored = False
    prompt_cache_key: Ignored = False
    prompt_cache_retention: Ignored = False
    reasoning_effort: Ignored = False
    safety_identifier: Ignored = False
    service_tier: Ignored = False
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
    return_sources: bool = Field(False, description="Say of each token who proposed it, as `sources` of its choice.")

    @field_validator("top_k")
    @classmethod
    def _minus_one_is_off(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is for stream=true; leave it out or stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_throughout(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class _Templated(_Body):
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


class ChatRequest(Generation, _Templated):
    """POST /v1/chat/completions. Without a limit an answer may take the rest of the context."""

    messages: Annotated[list[AskedMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=-1, description="-1 is the rest of the context.")
    max_tokens: int | None = Field(None, ge=-1, description="The older name of max_completion_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _minus_one_is_the_rest(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("should be at least 1, or -1 for the rest of the context")
        return None if value == -1 else value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens: is the older name of max_completion_tokens; give one of them")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: response_format is given too; give one of them")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


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
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

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

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self
