"""A model with experts is judged as far as rounding does not choose its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from engine.core.errors import ModelError
from engine.model.decoder import LeanDecoder
from engine.model.target import Target
from engine.model.trial.stock_logits import WholeStock

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
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

    def changed(self: WholeStock, tokens: list[int], starts: list[int], *options: Any) -> list[Tensor]:
        found = right(self, tokens, starts, *options)
        noise = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1)) * found[0].std() * by
        for start, logits in zip(starts, found, strict=True):
            if far_too or not start:
                logits[rows] += noise[rows]
        return found

    monkeypatch.setattr(WholeStock, "__call__", changed)
    if runs_lean:
        assert isinstance(Target.load(str(tmp_path)).forward, LeanDecoder)
    else:
        with pytest.raises(ModelError, match="its logits with one differ"):
            Target.load(str(tmp_path))
