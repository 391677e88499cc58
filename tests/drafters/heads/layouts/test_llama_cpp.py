"""Heads in GGUF files: they draft what the same heads in the public layouts draft, and bad files are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.growth.policies import Adaptive
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.layouts import llama_cpp
from drafters.heads.one_pass.block import BlockHead
from drafters.parts import parts
from drafters.requirements import check
from engine import SamplingParams
from engine.config import load
from engine.core.drafter_protocol import Verdict
from engine.core.errors import ModelError
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from engine.weights.resolve import with_own
from tests.drafters.conftest import HIDDEN, LLAMA, VOCAB, random_tensors, write_checkpoint
from tests.drafters.heads.layouts.head_gguf import write_head
from tests.drafters.heads.one_pass.test_block import CONFIGS, shapes
from tests.drafters.heads.test_eagle import DRAFT_VOCAB, EAGLE3

PROMPT, NEXT = [5, 6, 7, 8, 20, 11], 9
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
EAGLE3_CONFIG = LLAMA | {"draft_vocab_size": DRAFT_VOCAB}


def drafted(head: Head, hidden: int = HIDDEN) -> TokenTree:
    """The tree that follows a text, its tokens and scores. hidden: the target's size."""
    drafter = HeadDrafter(head, Adaptive(budget=24), shared_noise=False)
    drafter.start(1, PROMPT, SamplingParams(max_tokens=40, temperature=0.0))
    states = torch.randn(
        (len(PROMPT), len(head.feature_layers), hidden), generator=torch.Generator().manual_seed(3)
    ).bfloat16()
    drafter.observe(1, Verdict(TokenTree.root_only(PROMPT[-1]), [0], [NEXT], bfloat16_bits(states)))
    return drafter.propose(1)


def both(
    path: Path,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: TargetWeights,
    **options: Any,
) -> tuple[TokenTree, TokenTree]:
    """What the head in the public layout drafts, and the one in the GGUF file."""
    kind: Callable[..., Head] = Eagle3Head.load if architecture == "eagle3" else BlockHead.load
    public = kind(write_checkpoint(path / "public", "model.safetensors", config, tensors), target)
    stored = kind(write_head(path / "x.gguf", architecture, config, tensors, **options), target)
    assert public.feature_layers == stored.feature_layers
    assert torch.equal(public.target_ids, stored.target_ids)
    return drafted(public), drafted(stored)


def check_equal(trees: tuple[TokenTree, TokenTree]) -> None:
    one, other = trees
    assert len(one) > 3
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.parents, other.parents)
    assert np.array_equal(one.confidence, other.confidence)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
        {"num_key_value_heads": 4},
    ],
)
def test_an_eagle3_head_drafts_the_same_tokens_with_the_same_scores(
    changes: dict[str, Any], tmp_path: Path, target: TargetWeights
) -> None:
    tensors = dict(EAGLE3)
    if changes.get("norm_before_fc"):
        tensors |= random_tensors({"input_norm.weight": (3 * HIDDEN,)}, seed=8)
    if heads := changes.get("num_key_value_heads"):
        shape = (HIDDEN // 4 * heads, 2 * HIDDEN)
        tensors |= random_tensors({f"midlayer.self_attn.{name}_proj.weight": shape for name in ("k", "v")}, seed=9)
    check_equal(both(tmp_path, "eagle3", EAGLE3_CONFIG | changes, tensors, target))


def test_a_norm_of_the_hidden_states_changes_what_is_drafted(tmp_path: Path, target: TargetWeights) -> None:
    tensors = EAGLE3 | random_tensors({"input_norm.weight": (3 * HIDDEN,)}, seed=8)
    with_norm, _ = both(tmp_path / "a", "eagle3", EAGLE3_CONFIG | {"norm_before_fc": True}, tensors, target)
    without, _ = both(tmp_path / "b", "eagle3", EAGLE3_CONFIG, EAGLE3, target)
    assert not np.array_equal(with_norm.confidence, without.confidence)


def test_an_eagle3_head_of_the_whole_vocabulary_takes_the_targets_output_matrix(
    tmp_path: Path, target: TargetWeights
) -> None:
    dropped = ("d2t", "t2d", "lm_head.weight")
    tensors = {name: tensor for name, tensor in EAGLE3.items() if name not in dropped}
    trees = both(tmp_path, "eagle3", LLAMA, tensors, target)
    check_equal(trees)
    head = Eagle3Head.load(str(tmp_path / "x.gguf"), target)
    features = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(head.logits(features), head.norm(features) @ target.lm_head.T)
    assert len(head.target_ids) == VOCAB


def test_llama_3s_positions_are_those_of_the_public_layout(tmp_path: Path, target: TargetWeights) -> None:
    public = EAGLE3_CONFIG | {"rope_parameters": LLAMA["rope_parameters"] | LLAMA3 | {"rope_type": "llama3"}}
    one = Eagle3Head.load(write_checkpoint(tmp_path / "a", "model.safetensors", public, EAGLE3), target)
    other = Eagle3Head.load(write_head(tmp_path / "x.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3, scaling=LLAMA3), target)
    plain = Eagle3Head.load(write_head(tmp_path / "y.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3), target)
    tables = [head.layer.rotary.halves(200) for head in (one, other, plain)]
    torch.testing.assert_close(tables[0], tables[1], atol=1e-4, rtol=0)
    assert float((tables[0] - tables[2]).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_those_of_the_public_layout(kind: str, tmp_path: Path, target: TargetWeights) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    config = EAGLE3_CONFIG | {"rope_parameters": LLAMA["rope_parameters"] | scaling}
    changes = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    changes |= {"rope.scaling.original_context_length": 64} if kind == "yarn" else {}
    check_equal(both(tmp_path, "eagle3", config, EAGLE3, target, changes=changes))


def of_block(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head's configuration and tensors, with the target's output matrix."""
    config, names = dict(CONFIGS[name]), shapes(name)
    if name == "dspark":  # llama.cpp's confidence reads the token before too
        config["confidence_head_with_markov"] = True
        names["confidence_head.proj.weight"] = shapes("dspark gated")["confidence_head.proj.weight"]
    return config, random_tensors({name: shape for name, shape in names.items() if name != "lm_head.weight"})


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_one_pass_head_drafts_the_same_tokens_with_the_same_scores(
    name: str, causal: bool, tmp_path: Path, target: TargetWeights
) -> None:
    config, tensors = of_block(name)
    trees = both(tmp_path, "dflash", config | {"causal": causal}, tensors, target)
    check_equal(trees)


def test_a_dspark_head_whose_first_row_predicts_nothing_is_read_so(tmp_path: Path, target: TargetWeights) -> None:
    config, tensors = of_block("dspark")
    flash = {name: config[name] for name in ("target_layer_ids", "mask_token_id")}
    trees = both(
        tmp_path, "dflash", config | {"dflash_config": flash}, tensors, target, changes={"sample_from_anchor": False}
    )
    check_equal(trees)


def test_a_dspark_head_of_some_tokens_has_an_output_matrix_of_its_own(tmp_path: Path, target: TargetWeights) -> None:
    config, tensors = of_block("dspark")
    ids = torch.arange(1, 41)
    tensors |= random_tensors({"lm_head.weight": (40, HIDDEN), "markov_head.markov_w2.weight": (40, 6)}, seed=5)
    tensors |= {"d2t": ids - torch.arange(40), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    check_equal(both(tmp_path, "dflash", config | {"draft_vocab_size": 40}, tensors, target))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0])
def test_quantised_matrices_are_those_of_the_file(kind: Kind, tmp_path: Path, target: TargetWeights) -> None:
    def held(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] % 32 or not tensor.is_floating_point():
            return tensor
        return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).copy())

    tensors = {name: held(name, tensor) for name, tensor in EAGLE3.items()}
    public = Eagle3Head.load(write_checkpoint(tmp_path / "a", "model.safetensors", EAGLE3_CONFIG, tensors), target)
    stored = Eagle3Head.load(write_head(tmp_path / "x.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3, kind), target)
    features = torch.randn(3, HIDDEN)
    torch.testing.assert_close(public.logits(features), stored.logits(features), atol=0.03, rtol=0.03)
    trees = drafted(public), drafted(stored)
    assert trees[0].tokens[:4].tolist() == trees[1].tokens[:4].tolist()


def eagle3_file(path: Path, **changes: Any) -> str:
    return write_head(path / "x.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3, changes=changes)


@pytest.mark.parametrize(
    ("name", "wrong", "problem"),
    [
        ("d2t", torch.zeros(DRAFT_VOCAB), "tensor d2t does not hold tokens"),
        ("rope_freqs.weight", torch.ones(3), "tensor rope_freqs.weight is not of 4 numbers"),
    ],
)
def test_a_tensor_of_another_kind_or_length_is_refused_by_its_name(
    name: str, wrong: Tensor, problem: str, tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_head(tmp_path / "x.gguf", "eagle3", EAGLE3_CONFIG, EAGLE3, scaling=LLAMA3)
    read = llama_cpp._Head._read
    monkeypatch.setattr(
        llama_cpp._Head, "_read", lambda head, read_name: wrong if read_name == name else read(head, read_name)
    )
    with pytest.raises(ModelError, match=f"^drafter.path=.*x.gguf: {problem}"):
        Eagle3Head.load(str(file), target)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, target: TargetWeights) -> None:
    file = Path(eagle3_file(tmp_path))
    whole = file.read_bytes()
    for length in (len(whole) - 64, 900, 3):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"^drafter.path=.*x.gguf: (the GGUF file is cut short|is no GGUF file)"):
            Eagle3Head.load(str(file), target)


MISSING = "midlayer.hidden_norm.weight"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"target_layers": None}, "eagle3.target_layers names no layers"),
    ("eagle3", {"target_layers": [2, 3]}, "metadata: eagle_aux_hidden_state_layer_ids=.* does not name three layers"),
    ("eagle3", {"attention.head_count": 0}, "eagle3.attention.head_count: 0 is not a positive count"),
    ("eagle3", {"attention.head_count": 3}, "tensor blk.0.attn_q.weight has 32 rows for 3 heads"),
    ("eagle3", {"rope.dimension_count": 4}, "eagle3.rope.dimension_count: of 8 dimensions of a head, all"),
    ("eagle3", {"embedding_length": None}, "eagle3.embedding_length: None is not a positive count"),
    ("eagle3", {"rope.scaling.type": "longrope"}, "eagle3.rope.scaling.type: 'longrope' is not supported"),
    ("eagle3", {"attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon: 0.0 is not a positive number"),
    ("eagle3", {"target_hidden_size": 48}, "drafter hidden size 48 != target hidden size 32"),
    ("eagle3", {"vocab_size": 128}, "drafter vocabulary 128 != target vocabulary 64"),
    ("eagle3", {"target_layers": [2, 3, 8]}, "target has 6 layers, EAGLE-3 reads layers 2, 3, 8"),
    ("eagle3", {MISSING: None}, "tensor blk.0.attn_norm_2.weight is missing"),
    ("dflash", {"attention.sliding_window": 128}, "dflash.attention.sliding_window_pattern: is not of 2 layers"),
    ("dflash", {"embedding_scale": 8.0}, "dflash.embedding_scale: heads of such a family are not read"),
    ("dflash", {"hidden_activation": "gelu"}, "dflash.hidden_activation: 'gelu' is not supported, silu is"),
    ("dflash", {"rope.dimension_count": 4}, "dflash.rope.dimension_count: of 8 dimensions of a head, all"),
    ("dflash", {"tokenizer.ggml.mask_token_id": 900}, "metadata: mask_token_id=900 is no token of the target"),
    ("dflash", {"block_size": None}, "dflash.block_size: None is not a positive count"),
    ("dflash", {"lm_head.bias": torch.zeros(VOCAB)}, "tensor output.bias is not part of the block layout"),
    (
        "dflash",
        {"candidate_selector.hidden_projection.weight": torch.zeros(4, HIDDEN)},
        "metadata: conv_kernel_size=None is not a positive count",  # which DFlash 2 has
    ),
]


@pytest.mark.parametrize(("architecture", "changes", "problem"), REFUSED)
def test_a_file_that_holds_no_such_head_or_one_of_another_target_is_refused_with_the_key(
    architecture: str, changes: dict[str, Any], problem: str, tmp_path: Path, target: TargetWeights
) -> None:
    config, tensors = (EAGLE3_CONFIG, EAGLE3) if architecture == "eagle3" else of_block("dflash")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in changes}
    tensors |= {name: tensor for name, tensor in changes.items() if isinstance(tensor, Tensor)}
    metadata = {key: value for key, value in changes.items() if key != MISSING and not isinstance(value, Tensor)}
    file = write_head(tmp_path / "x.gguf", architecture, config, tensors, changes=metadata)
    load: Callable[..., Head] = Eagle3Head.load if architecture == "eagle3" else BlockHead.load
    with pytest.raises(ModelError, match=problem) as error:
        load(file, target)
    assert f"drafter.path={tmp_path}/x.gguf" in str(error.value) and "\n" not in str(error.value)


def test_a_head_for_another_method_or_a_model_is_refused_with_the_method(
    tmp_path: Path, target: TargetWeights, target_dir: Path
) -> None:
    with pytest.raises(ModelError, match="is a head for method eagle3, not block; take method=eagle3"):
        BlockHead.load(eagle3_file(tmp_path), target)
    model = write_head(tmp_path / "llama.gguf", "llama", LLAMA, EAGLE3, changes={"target_layers": None})
    with pytest.raises(ModelError, match=r"general.architecture is 'llama', which is no head for method eagle3"):
        Eagle3Head.load(model, target)


def test_a_hybrid_drafts_with_the_head_that_its_path_holds(tmp_path: Path, target_dir: Path) -> None:
    config, tensors = of_block("dflash")
    block = write_head(tmp_path / "block.gguf", "dflash", config, tensors)
    for path, head in ((eagle3_file(tmp_path), "eagle3"), (block, "block")):
        asked = load({"model": str(target_dir), "method": "hybrid", "drafter": {"path": path}})
        assert parts(with_own(asked)) == (head, "suffix")
        check(with_own(asked))
