"""Forwards run beside a thread that makes a model: then torch's default type is that model's, for all threads. A kernel
writes float32 whatever that type is, beyond the end of what was allocated as bfloat16.
"""

from __future__ import annotations

import pytest
import torch

from engine.core.batch import Segment
from engine.core.params import SamplingParams
from engine.model.target import Target
from engine.sampling.penalties import Penalties
from tests.default_type import DefaultTyped
from tests.engine.tiny_families import build

TEXT = [(i * 37) % 60 + 2 for i in range(100)]  # of more rows than a forward before has had
FAMILIES = ["llama", "qwen3.5", "qwen3 with experts", "gemma4 with inputs of layers", "phi with norms of heads"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_does_not_depend_on_the_default_type(family: str) -> None:
    target = Target.of_model(build(family, "bfloat16"), family, kv_memory=1 << 22)
    cache = target.new_cache(len(TEXT))
    torch.set_num_threads(2)  # which takes more scratch than forwards before
    with DefaultTyped() as noted:
        target.run([Segment.of_text(TEXT, cache, wanted="all")])
    assert not noted.seen


def test_penalties_do_not_depend_on_the_default_type() -> None:
    params = SamplingParams(
        presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias={3: 0.1, 4: -2.0}
    )
    logits = torch.randn(30)
    with DefaultTyped() as noted:
        Penalties(params, [1, 2], [3], 30)(logits)
    assert not noted.seen
