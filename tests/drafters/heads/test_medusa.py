"""Medusa and Hydra: the public layouts and the logits of their heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import MEDUSA_63, Adaptive, Static
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.hydra import HydraHead
from drafters.heads.medusa import MedusaHead
from engine.core.drafter_protocol import Verdict
from engine.core.errors import DrafterMismatch, ModelError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from tests.drafters.conftest import HIDDEN, VOCAB, random_tensors, write_checkpoint

COUNT = 3
MEDUSA = random_tensors(
    {
        name: shape
        for i in range(COUNT)
        for name, shape in {
            f"{i}.0.linear.weight": (HIDDEN, HIDDEN),
            f"{i}.0.linear.bias": (HIDDEN,),
            f"{i}.1.weight": (VOCAB, HIDDEN),
        }.items()
    }
)
HYDRA = random_tensors(
    {
        name: shape
        for i in range(COUNT)
        for name, shape in {
            f"hydra_mlp.{i}.0.linear.weight": (HIDDEN, (i + 2) * HIDDEN),
            f"hydra_mlp.{i}.0.linear.bias": (HIDDEN,),
            f"hydra_mlp.{i}.0.res_connection.weight": (HIDDEN, (i + 2) * HIDDEN),
            f"hydra_mlp.{i}.0.res_connection.bias": (HIDDEN,),
            f"hydra_mlp.{i}.1.linear.weight": (HIDDEN, HIDDEN),
            f"hydra_mlp.{i}.1.linear.bias": (HIDDEN,),
            f"hydra_lm_head.{i}.weight": (VOCAB, HIDDEN),
        }.items()
    }
)
HYDRA_CONFIG = {"hydra_num_heads": COUNT, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}


def medusa(path: Path, target: TargetWeights, tensors: dict[str, Tensor] = MEDUSA, **config: Any) -> MedusaHead:
    values = {"medusa_num_heads": COUNT, "medusa_num_layers": 1, **config}
    return MedusaHead.load(write_checkpoint(path, "medusa_lm_head.pt", values, tensors), target)


def hydra(path: Path, target: TargetWeights, tensors: dict[str, Tensor] = HYDRA, **config: Any) -> HydraHead:
    return HydraHead.load(write_checkpoint(path, "hydra_lm_head.pt", {**HYDRA_CONFIG, **config}, tensors), target)


def features(n: int) -> Tensor:
    return torch.randn(n, 1, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16().float()


def medusa_reference(weights: dict[str, Tensor], i: int, feature: Tensor) -> Tensor:
    x = feature + F.silu(weights[f"{i}.0.linear.weight"] @ feature + weights[f"{i}.0.linear.bias"])
    return weights[f"{i}.1.weight"] @ x


def hydra_reference(target: TargetWeights, path: list[int], feature: Tensor) -> Tensor:
    i = len(path) - 1
    x = torch.cat([feature, *target.embedding[path]])

    def linear(name: str, x: Tensor) -> Tensor:
        return HYDRA[f"hydra_mlp.{i}.{name}.weight"] @ x + HYDRA[f"hydra_mlp.{i}.{name}.bias"]

    x = linear("0.res_connection", x) + F.silu(linear("0.linear", x))
    return HYDRA[f"hydra_lm_head.{i}.weight"] @ (x + F.silu(linear("1.linear", x)))


def drafter(head: Head, policy: Any) -> HeadDrafter:
    drafter = HeadDrafter(head, policy)
    drafter.start(1, [5, 6, 7, 8], SamplingParams())
    drafter.observe(1, Verdict(TokenTree.root_only(8), [0], [9], bfloat16_bits(features(4))))
    return drafter


def test_a_public_medusa_checkpoint_gives_the_reference_logits_with_its_own_output_matrix_or_the_targets(
    tmp_path: Path, target: TargetWeights
) -> None:
    blocks = {name: tensor for name, tensor in MEDUSA.items() if "linear" in name}
    tied = MEDUSA | {f"{i}.1.weight": target.lm_head for i in range(COUNT)}
    own, shared = medusa(tmp_path, target), medusa(tmp_path / "tied", target, blocks, tie_lm_head=True)
    for head, weights in ((own, MEDUSA), (shared, tied)):
        ((logits,),) = head.logits(features(1)[0])
        for i in range(COUNT):
            torch.testing.assert_close(logits[i], medusa_reference(weights, i, features(1)[0, 0]), atol=1e-4, rtol=1e-4)


def test_medusa_drafts_as_deep_as_it_has_heads_with_the_same_candidates_below_every_node(
    tmp_path: Path, target: TargetWeights
) -> None:
    tree = drafter(medusa(tmp_path, target), Static(MEDUSA_63)).propose(1)
    last = features(4)[-1, 0]
    assert tree.depths.max() == COUNT
    for child in tree.children(0)[:3]:
        best = medusa_reference(MEDUSA, 1, last).topk(10).indices.tolist()
        drafted = [int(tree.tokens[node]) for node in tree.children(child)]
        assert drafted == best[: len(drafted)]


def test_a_continuation_uses_up_the_first_medusa_heads(tmp_path: Path, target: TargetWeights) -> None:
    proposer = drafter(medusa(tmp_path, target), Adaptive(top_k=4))
    tree = proposer.propose(1, [3, 4])
    assert [int(tree.tokens[node]) for node in tree.children(0)] == medusa_reference(
        MEDUSA, 2, features(4)[-1, 0]
    ).topk(4).indices.tolist()
    assert tree.depths.max() == 1
    assert len(proposer.propose(1, [3, 4, 5])) == 1


def test_a_public_hydra_checkpoint_gives_the_reference_logits(tmp_path: Path, target: TargetWeights) -> None:
    session = hydra(tmp_path, target).open([], 10, 20)
    session.commit(0, features(4), [6, 7, 8, 9])
    last = features(4)[-1, 0]
    torch.testing.assert_close(session.root()[0], hydra_reference(target, [9], last), atol=1e-4, rtol=1e-4)
    nodes, _ = session.extend([0, 0], [20, 21])
    _, logits = session.extend([nodes[1], 0, nodes[0]], [30, 31, 32])
    for row, path in zip(logits, [[9, 21, 30], [9, 31], [9, 20, 32]], strict=True):
        torch.testing.assert_close(row, hydra_reference(target, path, last), atol=1e-4, rtol=1e-4)


def test_hydra_files_with_dropout_places_in_their_names_are_read(tmp_path: Path, target: TargetWeights) -> None:
    renamed = {
        name.replace(".1.linear", ".3.linear").replace(".0.", ".1.", 1)
        if name.startswith(("hydra_mlp.1", "hydra_mlp.2"))
        else name: tensor
        for name, tensor in HYDRA.items()
    }
    renamed = {
        name.replace(f"hydra_lm_head.{name.split('.')[1]}", f"hydra_lm_head.{name.split('.')[1]}.1")
        if name.startswith("hydra_lm_head")
        else name: tensor
        for name, tensor in renamed.items()
    }
    one, two = hydra(tmp_path / "one", target), hydra(tmp_path / "two", target, renamed)
    x = torch.randn(2, 3 * HIDDEN)
    first, second = x.split([HIDDEN, 2 * HIDDEN], dim=1)
    torch.testing.assert_close(one.towers[1](first, second), two.towers[1](first, second))


@pytest.mark.parametrize(
    ("build", "tensors", "name"),
    [(medusa, MEDUSA, "1.1.weight"), (hydra, HYDRA, "hydra_mlp.1.0.res_connection.weight")],
)
def test_a_missing_extra_or_misshapen_tensor_is_refused_by_name(
    build: Any, tensors: dict[str, Tensor], name: str, tmp_path: Path, target: TargetWeights
) -> None:
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    for damaged, culprit in (
        (without, name),
        (without | {name: torch.zeros(3, 3)}, name),
        (tensors | {"9.9.weight": torch.zeros(1)}, "9.9.weight"),
    ):
        with pytest.raises(ModelError, match=culprit.replace(".", r"\.")):
            build(tmp_path, target, damaged)


def test_heads_of_another_width_and_variants_that_are_not_read_are_refused(
    tmp_path: Path, target: TargetWeights
) -> None:
    with pytest.raises(DrafterMismatch, match="hidden size 16 != target hidden size 32"):
        medusa(tmp_path, target, {"0.0.linear.weight": torch.zeros(16, 16)})
    for name, value in (("hydra_head_arch", "eagle-attn"), ("grounded_heads", False)):
        with pytest.raises(ModelError, match=name):
            hydra(tmp_path, target, **{name: value})
