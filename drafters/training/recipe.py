"""Recipes: configs/train/*.yaml, everything that decides what a training run produces."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import yaml_error
from engine.core.errors import ConfigError

Method = Literal["eagle", "eagle3", "medusa", "hydra", "sps", "block"]


class Recipe(BaseModel):
    """Data: prompts: the most that are used, held_out of them only for the acceptance table; answer_tokens,
    answer_batch, temperature: how the target answers them (0 is greedy); answers_each: to a prompt of `talon tune`, all
    but the first at `further_temperature`, while there is time; length: tokens of an example, prompt included.

    store_features: keep the target's hidden states on disk (StoredFeatures) instead of computing them in every epoch.
    An accelerator holds them in its memory instead, if they fit.

    Optimisation: steps of `batch` examples, with drafts from `anchors` places of each (0: from all);
    evaluate_every: steps between two measurements on held-out text, unless the time is given; lr with linear warmup
    (steps) and cosine decay; unroll: steps of training-time test (EAGLE-3), each weighted `step_decay` times the
    one before; entropy_weight, distance_weight: of the cross-entropy and of the distance |p - q| to the target's
    distribution; feature_weight, logit_weight: parts of EAGLE's loss; feature_noise: width of the uniform noise on
    its input.

    Head: intermediate_size of the layer, or mlp_ratio, the same in hidden sizes; draft_vocab_size (EAGLE-3), 0 is
    all; heads and blocks (Medusa, Hydra); tie_lm_head: use the target's output matrix instead of training one per
    head (Medusa, Hydra). hidden_size, layers, attention_heads: of the small model (sps). layers, markov_rank: of
    the block head, whose rows are `unroll`; known_share: share of its drafts that start with given tokens.
    stored_bits: of a weight in the head's file; 8 halve it, but only Talon reads it then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method
    prompts: int = Field(20000, ge=2)
    held_out: int = Field(64, ge=1)
    answer_tokens: int = Field(256, ge=1)
    answer_batch: int = Field(32, ge=1)
    temperature: float = Field(0.0, ge=0)
    answers_each: int = Field(1, ge=1)
    further_temperature: float = Field(0.8, gt=0)
    length: int = Field(384, ge=8)
    store_features: bool = True
    steps: int = Field(2000, ge=1)
    batch: int = Field(8, ge=1)
    anchors: int = Field(0, ge=0)
    evaluate_every: int = Field(250, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup: int = Field(50, ge=0)
    seed: int = 0
    unroll: int = Field(1, ge=1)
    step_decay: float = Field(0.8, gt=0)
    entropy_weight: float = Field(1.0, ge=0)
    distance_weight: float = Field(0.0, ge=0)
    feature_weight: float = Field(1.0, ge=0)
    logit_weight: float = Field(0.1, ge=0)
    feature_noise: float = Field(0.0, ge=0)
    intermediate_size: int | None = Field(None, ge=1)
    mlp_ratio: float | None = Field(None, gt=0)
    draft_vocab_size: int = Field(0, ge=0)
    heads: int = Field(4, ge=1)
    blocks: int = Field(1, ge=1)
    tie_lm_head: bool = False
    hidden_size: int = Field(160, ge=8)
    layers: int = Field(2, ge=1)
    markov_rank: int = Field(128, ge=1)
    known_share: float = Field(0.0, ge=0, le=1)
    attention_heads: int = Field(5, ge=1)
    stored_bits: Literal[8, 16] = 16

    @classmethod
    def load(cls, path: Path, method: str, **overrides: object) -> Recipe:
        """Read the recipe in `path` with command-line `overrides` (None means not given)."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf8"))
        except OSError as error:
            raise ConfigError(f"recipe={path}: cannot be read ({error.strerror}): give --recipe FILE") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"recipe={path}: is not YAML ({yaml_error(error)}): correct the file") from None
        if not isinstance(values, dict) or values.get("method", method) != method:
            raise ConfigError(f"recipe={path}: is not a recipe for {method}: give one with `method: {method}`")
        values = {**values, "method": method, **{key: v for key, v in overrides.items() if v is not None}}
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"recipe={path}: {'.'.join(map(str, first['loc']))}: {first['msg']}: correct the file"
            ) from None
