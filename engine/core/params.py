"""SamplingParams: how a request's tokens are chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from engine.core.errors import HALF_A_CHARACTER, ModelError, RequestError, is_text, shown
from engine.core.grammar import Grammar

MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 1024
"""Stop texts of a request, and characters of each: every character of an answer is compared with all of them."""
MOST_STOP_TOKENS = 1024
COLDEST = 1e-3
"""Up to this temperature a request is greedy. At lower ones only equal logits would be left to the noise."""
FROM_MODEL = ("top_k", "top_p", "min_p", "repetition_penalty")
"""Fields that a request may leave to the model."""
NOT_APPLIED = (
    "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "min_length", "min_new_tokens",
    "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "num_beams", "guidance_scale", "stop_strings",
)  # fmt: skip
"""Settings of a generation_config.json that would change the text and that Talon does not apply."""

_Check = tuple[bool, str, Any, str]
"""Whether a field's value is allowed, the field, its value, and what to do where it is not."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """A request's own drafting options: they affect its speed, never its text.

    off: plain decoding. budget: maximum nodes of a tree, root included, up to the engine's drafter.budget. owner: whose
    earlier answers the request is drafted from, and whose later ones are drafted from its answer, for drafters that
    remember answers; "" is the program itself, None is nobody. What stands before a slash in it is the tenant, who
    shares saved blocks of the prompt cache.
    """

    off: bool = False
    budget: int | None = None
    owner: str | None = ""

    def validate(self) -> Speculation:
        """Return it with every value converted to its type. Raises RequestError naming the wrong field."""
        values = _converted(self, "speculation.")
        if values["budget"] is not None and values["budget"] < 2:
            raise RequestError(f"speculation.budget={shown(self.budget)}: use 2 nodes or more, or off=True")
        if not is_text(values["owner"] or ""):
            raise RequestError(f"speculation.owner={shown(self.owner)}: {HALF_A_CHARACTER}")
        return Speculation(**values)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. The same seed gives the same text with every drafter and mode.

    temperature: 0 is greedy, and always the default: whether to sample is the caller's choice, whatever the model's
    files say. Up to `COLDEST` it is greedy too, as are top_k=1 and top_p=0: of equal logits the lowest id wins. top_k,
    top_p, min_p: how many of the likeliest tokens to keep and two fractions of probability, applied in that order after
    the temperature, as `transformers` does. repetition_penalty: > 1 discourages tokens of prompt and answer. These four
    are None by default: the value in the model's generation_config.json, or off if it has none; 0, 1.0, 0.0 and 1.0
    turn them off whatever it says.
    max_tokens, min_tokens: of the answer. stop: texts that end the answer and are not part of it; those that end within
    the first min_tokens tokens do not count. stop_token_ids: tokens that end the answer and are not part of its text;
    like the end-of-sequence token they cannot come among the first min_tokens.
    ignore_eos: continue after the end-of-sequence token (benchmarks of fixed length).

    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once per token and once per
    occurrence; the prompt does not count. logit_bias: added to the logits of these token ids, after the penalties.
    grammar: what the answer must look like; the end-of-sequence token may come only where it is complete. All of these
    apply before the temperature.
    logprobs: None, or how many alternatives to return with each token and its log-probability. prompt_logprobs: the
    same for the tokens of the prompt. Both are of the model's own distribution, before anything here changes it.
    speculation: whether and how far to draft for this request.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    speculation: Speculation | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is drawn, whatever the noise."""
        return self.temperature <= COLDEST or self.top_k == 1 or self.top_p == 0

    def validate(self) -> SamplingParams:
        """Return the parameters with every value converted to its type, or raise RequestError naming the first wrong
        field.
        """
        values = _converted(self)
        for name in ("grammar", "speculation"):
            if values[name] is not None:
                values[name] = values[name].validate()
        return SamplingParams(**values)._in_range()

    @property
    def owner(self) -> str | None:
        """Whose memory the request shares (`Speculation.owner`)."""
        return "" if self.speculation is None else self.speculation.owner

    @property
    def tenant(self) -> str:
        """Whose blocks of the prompt cache on disk the request shares."""
        return (self.owner or "").partition("/")[0]

    def of_choice(self, index: int) -> SamplingParams:
        """Return the parameters of answer `index` of `n` to one prompt: the seed is advanced by `index`."""
        return msgspec.structs.replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)

    def limited(self, max_tokens: int) -> SamplingParams:
        """Return the same with another limit, which alone is checked. Raises RequestError."""
        limited = msgspec.structs.replace(self, max_tokens=max_tokens)
        _require(limited._limits())
        return limited

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """Return the same, with the model's `own_defaults` for the fields left open."""
        left = {name: getattr(defaults, name) for name in FROM_MODEL if getattr(self, name) is None}
        return msgspec.structs.replace(self, **left)

    def _limits(self) -> tuple[_Check, ...]:
        return (
            (self.max_tokens >= 1, "max_tokens", self.max_tokens, "ask for at least one token"),
            (
                0 <= self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"use a count from 0 to max_tokens={self.max_tokens}",
            ),
        )

    def _in_range(self) -> SamplingParams:
        checks: tuple[_Check, ...] = (
            (
                0 <= self.temperature < float("inf"),
                "temperature",
                self.temperature,
                "use 0 (greedy) or a positive number",
            ),
            (self.top_k is None or 0 <= self.top_k < 2**63, "top_k", self.top_k, "use 0 (off) or a positive count"),
            (self.top_p is None or 0 <= self.top_p <= 1, "top_p", self.top_p, "use a fraction in [0, 1], 0 is greedy"),
            (self.min_p is None or 0 <= self.min_p < 1, "min_p", self.min_p, "use a fraction in [0, 1)"),
            (
                self.repetition_penalty is None or 0 < self.repetition_penalty < float("inf"),
                "repetition_penalty",
                self.repetition_penalty,
                "use a positive number, 1 is off",
            ),
            (-(2**63) <= self.seed < 2**63, "seed", self.seed, "use a 64-bit integer"),
            *self._limits(),
            (
                len(self.stop) <= MOST_STOPS,
                "stop",
                self.stop,
                f"holds {len(self.stop)} texts; {MOST_STOPS} are the most",
            ),
            (all(self.stop), "stop", self.stop, "remove the empty string"),
            (
                all(len(text) <= LONGEST_STOP for text in self.stop),
                "stop",
                self.stop,
                f"holds a text of {max(map(len, self.stop), default=0)} characters; {LONGEST_STOP} are the most",
            ),
            (all(map(is_text, self.stop)), "stop", self.stop, HALF_A_CHARACTER),
            (
                len(self.stop_token_ids) <= MOST_STOP_TOKENS,
                "stop_token_ids",
                self.stop_token_ids,
                f"holds {len(self.stop_token_ids)} tokens; {MOST_STOP_TOKENS} are the most",
            ),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "use a number from -2 to 2"),
            (
                -2 <= self.frequency_penalty <= 2,
                "frequency_penalty",
                self.frequency_penalty,
                "use a number from -2 to 2",
            ),
            (
                all(-100 <= value <= 100 for value in self.logit_bias.values()),
                "logit_bias",
                self.logit_bias,
                "use numbers from -100 to 100",
            ),
            (_is_count(self.logprobs), "logprobs", self.logprobs, f"use a count from 0 to {MOST_LOGPROBS}, or None"),
            (
                _is_count(self.prompt_logprobs),
                "prompt_logprobs",
                self.prompt_logprobs,
                f"use a count from 0 to {MOST_LOGPROBS}, or None",
            ),
        )
        _require(checks)
        return self


def _require(checks: Iterable[_Check]) -> None:
    """Raise RequestError for the first check that fails."""
    for ok, field, value, fix in checks:
        if not ok:
            raise RequestError(f"{field}={shown(value)}: {fix}")


def _converted(params: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Convert the fields of `params` to their declared types; RequestError names the first that cannot be."""
    values = {}
    for field in _fields(type(params)):
        value = getattr(params, field.name)
        if field.name == "stop" and isinstance(value, str):
            value = (value,)
        try:
            values[field.name] = _of_type(value, field.type)
        except (msgspec.ValidationError, TypeError) as error:
            reason = str(error).split(" - at")[0].lower().replace("`array`", "a list").replace("| null", "or None")
            raise RequestError(f"{prefix}{field.name}={shown(value)}: {reason}") from None
    return values


def _of_type(value: Any, kind: Any) -> Any:
    """Convert a value to a type, and what numpy's numbers and arrays are in it to Python's."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError):
        return msgspec.convert(_plain(value), kind)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a struct; resolving their types takes longer than checking them."""
    return msgspec.structs.fields(kind)


def _is_count(logprobs: int | None) -> bool:
    return logprobs is None or 0 <= logprobs <= MOST_LOGPROBS


def left_open(generation_config: Any) -> dict[str, Any]:
    """Return what a model's generation_config.json, as `transformers` loads it, says of the fields in FROM_MODEL."""
    return {name: getattr(generation_config, name, None) for name in FROM_MODEL}


def own_defaults(generation: Mapping[str, Any], model: str) -> SamplingParams:
    """Return what `left_open` has found, as parameters. Raises ModelError naming an invalid value."""
    try:
        return SamplingParams(**generation).validate()
    except RequestError as error:
        raise ModelError(f"model={model}: generation_config.json: {error}") from None


def not_applied(generation_config: Any) -> list[str]:
    """Return the settings of a generation_config.json that would change the text and that Talon does not follow."""
    usual = type(generation_config)()
    named = ((name, getattr(generation_config, name, None)) for name in NOT_APPLIED)
    return [f"{name}={shown(value)}" for name, value in named if value not in (None, getattr(usual, name, None))]
