"""SamplingParams: how a request's tokens are chosen."""

from __future__ import annotations

import msgspec

from engine.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. The same seed gives the same text with every drafter and mode.

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: fractions of probability, applied in that order after
    the temperature, as `transformers` does. repetition_penalty: > 1 discourages tokens of prompt and answer.
    max_tokens, min_tokens: of the answer. stop: texts that end the answer and are not part of it.
    ignore_eos: go on after the end-of-sequence token (benchmarks of fixed length).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
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
                reason = str(error).split(" - at")[0].lower().replace("`array`", "a list").replace("`null`", "None")
                raise RequestError(f"{field.name}={value!r}: {reason}") from None
        return SamplingParams(**values)._in_range()

    def _in_range(self) -> SamplingParams:
        for ok, field, value, fix in (
            (
                0 <= self.temperature < float("inf"),
                "temperature",
                self.temperature,
                "use 0 (greedy) or a positive number",
            ),
            (0 <= self.top_k < 2**63, "top_k", self.top_k, "use 0 (off) or a positive count"),
            (0 < self.top_p <= 1, "top_p", self.top_p, "use a fraction in (0, 1]"),
            (0 <= self.min_p < 1, "min_p", self.min_p, "use a fraction in [0, 1)"),
            (
                0 < self.repetition_penalty < float("inf"),
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
