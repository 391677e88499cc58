"""How a router chooses experts is read by trying it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Lfm2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from engine.model.reader.router import Routing, routing_of
from engine.model.structure import OtherStructure

SIZES: dict[str, Any] = {"hidden_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 3}
GROUPS = {"n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("router", "options", "expected"),
    [
        ("v3", {"n_group": 1, "topk_group": 1}, Routing(True, True)),
        ("v3", GROUPS, Routing(True, True, 4, 2, 2)),
        ("v3", GROUPS | {"norm_topk_prob": False, "routed_scaling_factor": 1.5}, Routing(True, False, 4, 2, 2)),
        ("v2", GROUPS | {"topk_method": "greedy"}, Routing(False, False)),
        ("v2", GROUPS | {"topk_method": "group_limited_greedy"}, Routing(False, False, 4, 2, 1)),
    ],
)
def test_a_router_is_read_as_it_chooses(router: str, options: dict[str, Any], expected: Routing) -> None:
    made: Any = (
        DeepseekV3TopkRouter(DeepseekV3Config(**SIZES | options))
        if router == "v3"
        else DeepseekV2TopkRouter(DeepseekV2Config(**SIZES | options))
    )
    assert routing_of(made) == expected
    assert routing_of(made.to("meta")) == expected


@pytest.mark.parametrize("corrected", [True, False])
def test_the_constant_of_a_router_is_that_of_its_family(corrected: bool) -> None:
    sizes = {"hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    assert routing_of(Lfm2MoeTopKRouter(Lfm2MoeConfig(**sizes, use_expert_bias=corrected))) == Routing(
        True, True, least=1e-6
    )
    assert routing_of(DeepseekV3TopkRouter(DeepseekV3Config(**SIZES | GROUPS))).least == 1e-20


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    class Worst(DeepseekV3TopkRouter):
        """Chooses the least likely."""

        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, shares, chosen = super().forward(-hidden_states)
            return -logits, shares, chosen

    with pytest.raises(OtherStructure, match="Worst, which chooses experts in a way of its own"):
        routing_of(Worst(DeepseekV3Config(**SIZES | GROUPS)))
