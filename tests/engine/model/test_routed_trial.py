"""A model with experts is judged as far as rounding does not choose its experts, and by tokens that are far apart."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from engine.core.errors import ModelError
from engine.model import decoder
from engine.model.decoder import LeanDecoder
from engine.model.rotary import Frequencies, RotaryTables
from engine.model.target import Target
from engine.model.trial.stock_logits import Offsets, WholeStock
from tests.engine.weights.family_gguf import random_model

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
BASES = (0.5, 2.0)
LAST_FOUR, ALL = slice(-4, None), slice(None)


@pytest.mark.parametrize(
    ("experts", "rows", "by", "far_too", "runs_lean"),
    [
        pytest.param(True, LAST_FOUR, 1.0, True, True, id="other experts in some rows"),
        pytest.param(False, LAST_FOUR, 1.0, True, False, id="some rows that differ without experts"),
        pytest.param(True, ALL, 0.2, True, False, id="all rows that differ"),
        pytest.param(True, ALL, 0.2, False, True, id="no more than the stock forward from itself"),
        pytest.param(True, ALL, 1.0, False, False, id="more than rows of 8 bits may"),
        pytest.param(False, ALL, 0.2, False, False, id="no more than from itself, without experts"),
    ],
)
def test_what_may_differ_in_bfloat16(
    experts: bool,
    rows: slice,
    by: float,
    far_too: bool,
    runs_lean: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(num_local_experts=4, **SIZES) if experts else LlamaConfig(**SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    right = WholeStock.__call__

    def changed(self: WholeStock, tokens: list[int], offsets: list[Offsets], *options: Any) -> list[Tensor]:
        found = right(self, tokens, offsets, *options)
        noise = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1)) * found[0].std() * by
        for places, logits in zip(offsets, found, strict=True):
            if far_too or not any(places):
                logits[rows] += noise[rows]
        return found

    monkeypatch.setattr(WholeStock, "__call__", changed)
    if runs_lean:
        assert isinstance(Target.load(str(tmp_path)).forward, LeanDecoder)
    else:
        with pytest.raises(ModelError, match="its logits with one differ"):
            Target.load(str(tmp_path))


@pytest.mark.parametrize("of_base", BASES)
def test_a_wrong_rotary_base_is_seen(of_base: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In near texts it changes logits by little more than rounding does: by 0.01 of their deviation here."""

    def wrong(kinds: Sequence[Frequencies]) -> RotaryTables:
        powers = [[of_base ** (-at / len(kind.of_position)) for at in range(len(kind.of_position))] for kind in kinds]
        angles = [tuple(map(mul, kind.of_position, some)) for kind, some in zip(kinds, powers, strict=True)]
        return RotaryTables([Frequencies(*one) for one in zip(angles, [k.scaling for k in kinds], strict=True)])

    model = random_model("gpt-oss").bfloat16()
    assert isinstance(Target.of_model(deepcopy(model), "right", kv_memory=1 << 22).forward, LeanDecoder)
    monkeypatch.setattr(decoder, "RotaryTables", wrong)
    target = Target.of_model(model, "wrong", kv_memory=1 << 22)
    assert not isinstance(target.forward, LeanDecoder)
    assert target.stock_reason == "its logits differ from those of the lean decoder"
