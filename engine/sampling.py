"""SamplingParams: how a request's tokens are chosen."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.errors import ModelError, RequestError

FROM_MODEL = ("top_k", "top_p", "min_p", "repetition_penalty")
"""Fields that a request may leave to the model."""
NOT_APPLIED = (
    "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "min_length", "min_new_tokens",
    "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "num_beams", "guidance_scale", "stop_strings",
)  # fmt: skip
"""What else in a generation_config.json would change the text, and Talon does not do."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. The same seed gives the same text with every drafter and mode.

    temperature: 0 is greedy, and always the default: whether to sample is the caller's choice, whatever the model's
    files say. top_k, top_p, min_p: how many of the likeliest tokens to keep and two fractions of probability, applied
    in that order after the temperature, as `transformers` does. repetition_penalty: > 1 discourages tokens of prompt
    and answer. These four are None by default: the value in the model's generation_config.json, or off if it has none;
    0, 1.0, 0.0 and 1.0 turn them off whatever it says.
    max_tokens, min_tokens: of the answer. stop: texts that end the answer and are not part of it.
    ignore_eos: go on after the end-of-sequence token (benchmarks of fixed length).
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
    ignore_eos: bool = False

    def validate(self) -> SamplingParams:
        """Return the parameters with every value of its type, or raise RequestError naming the first wrong field."""
        values = {}
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                values[field.name] = msgspec.convert(value.item() if hasattr(value, "item") else value, field.type)
            except (msgspec.ValidationError, TypeError) as error:
                reason = str(error).split(" - at")[0].lower().replace("`array`", "a list").replace("| null", "or None")
                raise RequestError(f"{field.name}={value!r}: {reason}") from None
        return SamplingParams(**values)._in_range()

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """The same, with the model's `own_defaults` where these parameters leave it the choice."""
        left = {name: getattr(defaults, name) for name in FROM_MODEL if getattr(self, name) is None}
        return msgspec.structs.replace(self, **left)

    def _in_range(self) -> SamplingParams:
        for ok, field, value, fix in (
            (
                0 <= self.temperature < float("inf"),
                "temperature",
                self.temperature,
                "use 0 (greedy) or a positive number",
            ),
            (self.top_k is None or 0 <= self.top_k < 2**63, "top_k", self.top_k, "use 0 (off) or a positive count"),
            (self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "use a fraction in (0, 1]"),
            (self.min_p is None or 0 <= self.min_p < 1, "min_p", self.min_p, "use a fraction in [0, 1)"),
            (
                self.repetition_penalty is None or 0 < self.repetition_penalty < float("inf"),
                "repetition_penalty",
                self.repetition_penalty,
                "use a positive number, 1 is off",
            ),
            (-(2**63) <= self.seed < 2**63, "seed", self.seed, "use a 64-bit integer"),
            (self.max_tokens >= 1, "max_tokens", self.max_tokens, "ask for at least one token"),
            (
                0 <= self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"use a count from 0 to max_tokens={self.max_tokens}",
            ),
            (all(self.stop), "stop", self.stop, "remove the empty string"),
        ):
            if not ok:
                raise RequestError(f"{field}={value!r}: {fix}")
        return self


def own_defaults(generation_config: Any, model: str) -> SamplingParams:
    """What a model's generation_config.json, as `transformers` loads it, says of the fields that a request may leave
    to it. Raises ModelError naming a value that makes no sense.
    """
    values: dict[str, Any] = {name: getattr(generation_config, name, None) for name in FROM_MODEL}
    try:
        return SamplingParams(**values).validate()
    except RequestError as error:
        raise ModelError(f"model={model}: generation_config.json: {error}") from None


def not_applied(generation_config: Any) -> list[str]:
    """The settings of a generation_config.json that would change the text and that Talon does not follow."""
    usual = type(generation_config)()
    named = ((name, getattr(generation_config, name, None)) for name in NOT_APPLIED)
    return [f"{name}={value!r}" for name, value in named if value not in (None, getattr(usual, name, None))]
