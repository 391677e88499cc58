"""What an editor may ask for, with llama.cpp's names and defaults. What is not defined here is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from engine.core.params import LONGEST_STOP, MOST_STOPS
from engine.server.body import Body, Ignored
from engine.server.schema import CompletionRequest, SpeculationFields


class ExtraFile(Body):
    """A piece of another file. Editors add fields of their own, such as when it was copied."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    text: str
    filename: str = "tmp"


class InfillRequest(Body):
    """POST /infill: what stands between a prefix and a suffix. The prompt is what the user has typed of it."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=1024)
    prompt: str = ""
    model: str | None = None
    n_predict: int = Field(-1, ge=-1, lt=2**31, description="-1 is the rest of the context, 0 reads the prompt alone.")
    stream: bool = False
    temperature: float = Field(0.8, ge=0, le=100)
    top_k: int = Field(40, ge=-1, lt=2**31)
    top_p: float = Field(0.95, ge=0, le=1)
    min_p: float = Field(0.05, ge=0, lt=1)
    repeat_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int = Field(-1, ge=-(2**63), lt=2**63, description="-1 is a random one.")
    stop: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]
        | None
    ) = None
    ignore_eos: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    response_fields: Annotated[list[str], Field(max_length=64)] | None = Field(
        None, description="The fields that are wanted; a slash names one within another."
    )
    n_probs: Literal[0] = Field(0, description="Log-probabilities are in /v1/completions.")

    # Without effect.
    cache_prompt: Ignored = False
    id_slot: Ignored = False
    min_keep: Ignored = False
    n_cache_reuse: Ignored = False
    n_indent: Ignored = False
    n_keep: Ignored = False
    repeat_last_n: Ignored = False
    samplers: Ignored = False
    t_max_predict_ms: Ignored = False
    t_max_prompt_ms: Ignored = False
    timings_per_token: Ignored = False

    # Beyond llama.cpp.
    speculation: SpeculationFields | None = None

    def completion(self, model: str, tokens: list[int], ends: Sequence[int]) -> CompletionRequest:
        """Return the same as a text completion of a prompt's tokens. ends: tokens that end an answer."""
        same = ("stream", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*same, "stop", "ignore_eos", "speculation")}
        fields |= {"model": model, "prompt": tokens, "repetition_penalty": self.repeat_penalty}
        fields |= {"seed": None if self.seed == -1 else self.seed, "max_tokens": self.n_predict or 1}
        fields["stop_token_ids"] = list(ends)
        return CompletionRequest.model_validate(fields)
