"""One-pass heads: published layouts read as they are, blocks against a plain forward, trees that follow the links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Adaptive
from drafters.heads.growth.ranking import Ranking
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.one_pass.block import BlockHead
from drafters.heads.one_pass.block_session import BlockSession
from drafters.heads.one_pass.block_weights import Outputs
from engine.core.drafter_protocol import Verdict
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from tests.drafters.conftest import FFN, HEADS, HIDDEN, KV_HEADS, LLAMA, VOCAB, random_tensors, write_checkpoint
from tests.drafters.reference import rms, rope

DRAFT_LAYERS, SIZE, RANK, MASK = 2, 5, 6, 7
READ = [1, 3]  # the layers whose outputs are the context
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": DRAFT_LAYERS,
    "head_dim": HIDDEN // HEADS,
    "block_size": SIZE,
}
FLASH = {"target_layer_ids": READ, "mask_token_id": MASK}
CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": {**QWEN3, "num_target_layers": 6, "dflash_config": FLASH},
    "jetspec": {**QWEN3, "num_target_layers": 6, "dflash_config": {**FLASH, "causal_head": True}},
    "dspark": {
        **QWEN3, "target_layer_ids": READ, "mask_token_id": MASK, "num_anchors": 512, "markov_rank": RANK,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": False,
    },
    "dspark gated": {
        **QWEN3, "target_layer_ids": READ, "mask_token_id": MASK, "num_anchors": 512, "markov_rank": RANK,
        "markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a published file."""
    head = HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(READ) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,),
    }  # fmt: skip
    for i in range(DRAFT_LAYERS):
        found |= {
            f"layers.{i}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (head * KV_HEADS, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (head * KV_HEADS, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"layers.{i}.self_attn.q_norm.weight": (head,),
            f"layers.{i}.self_attn.k_norm.weight": (head,),
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"layers.{i}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    if kind.startswith("dspark"):
        config = CONFIGS[kind]
        found |= {
            "embed_tokens.weight": (VOCAB, HIDDEN),
            "lm_head.weight": (VOCAB, HIDDEN),
            "markov_head.markov_w1.weight": (VOCAB, RANK),
            "markov_head.markov_w2.weight": (VOCAB, RANK),
            "confidence_head.proj.weight": (1, HIDDEN + RANK * config["confidence_head_with_markov"]),
            "confidence_head.proj.bias": (1,),
        }
    if kind == "dspark gated":
        found |= {
            "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
            "markov_head.gate_proj.bias": (RANK,),
        }
    return found


def block(path: Path, target: TargetWeights) -> BlockHead:
    """Talon's own layout: no q/k norms, a draft vocabulary, a mask of its own, rows that begin with the context."""
    drafted = torch.arange(1, 41)
    dropped = ("embed_tokens", "lm_head", "q_norm", "k_norm", "markov_w2")
    names = {name: shape for name, shape in shapes("dspark gated").items() if not any(part in name for part in dropped)}
    own = {
        "entry.weight": (HIDDEN, 2 * HIDDEN),
        "mask_embedding": (HIDDEN,),
        "markov_head.markov_w2.weight": (40, RANK),
    }
    tensors = random_tensors(names | own)
    tensors |= {
        "d2t": drafted - torch.arange(40),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafted, True),
    }
    config = {key: value for key, value in CONFIGS["dspark gated"].items() if key != "mask_token_id"}
    config |= {"draft_vocab_size": 40, "causal": True, "known_beginnings": True}
    return BlockHead.load(write_checkpoint(path, "model.safetensors", config, tensors), target)


Mix = Callable[[int, Tensor], Tensor]


def plain_states(
    weights: dict[str, Tensor],
    embedding: Tensor,
    features: Tensor,
    block: list[int],
    causal: bool,
    leaves: Callable[[int, Tensor], Tensor] = lambda layer, x: x,
    window: int = 0,
    mixer: Callable[[str, Tensor], Mix] = lambda part, normed: lambda side, x: x,
) -> Tensor:
    """[block, hidden]: one whole forward, row by row, without a cache. features: [context, layers, hidden]. leaves: how
    the states that leave a layer change. mixer: how rows are mixed as they enter (0) and leave (1) a layer's part.
    """
    context = rms(features.flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    past, size = len(context), len(block)
    x = embedding[block]
    for i in range(DRAFT_LAYERS):
        name = f"layers.{i}"
        normed = rms(x, weights[f"{name}.input_layernorm.weight"])
        mix = mixer(f"{name}.attention_conv", normed)
        entered = mix(0, normed)
        both = torch.cat([context, entered])

        def heads(of: Tensor, what: str, count: int, name: str = name) -> Tensor:
            return (of @ weights[f"{name}.self_attn.{what}_proj.weight"].T).view(len(of), count, -1)

        key = rope(rms(heads(both, "k", KV_HEADS), weights[f"{name}.self_attn.k_norm.weight"]))
        value = heads(both, "v", KV_HEADS)
        query = rms(heads(entered, "q", HEADS), weights[f"{name}.self_attn.q_norm.weight"])
        query = rope(torch.cat([torch.zeros(past, *query.shape[1:]), query]))[past:]
        attended = torch.zeros_like(query)
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            for row in range(size):
                end = past + row + 1 if causal else past + size
                seen = slice(max(0, end - window) if window else 0, end)
                scores = key[seen, shared] @ query[row, head] / query.shape[-1] ** 0.5
                attended[row, head] = scores.softmax(0) @ value[seen, shared]
        x = x + mix(1, attended.reshape(size, -1) @ weights[f"{name}.self_attn.o_proj.weight"].T)
        normed = rms(x, weights[f"{name}.post_attention_layernorm.weight"])
        mix = mixer(f"{name}.mlp_conv", normed)
        entered = mix(0, normed)
        gate = torch.nn.functional.silu(entered @ weights[f"{name}.mlp.gate_proj.weight"].T)
        inner = gate * (entered @ weights[f"{name}.mlp.up_proj.weight"].T)
        x = leaves(i, x + mix(1, inner @ weights[f"{name}.mlp.down_proj.weight"].T))
    return rms(x, weights["norm.weight"])


def plain_logits(kind: str, weights: dict[str, Tensor], lm_head: Tensor, state: Tensor, before: int) -> Tensor:
    """[vocab]: one row, behind the token `before`."""
    logits = state @ lm_head.T
    if kind.startswith("dspark"):
        latent = weights["markov_head.markov_w1.weight"][before]
        if kind == "dspark gated":
            both = torch.cat([state, latent])
            gate = weights["markov_head.gate_proj.weight"] @ both + weights["markov_head.gate_proj.bias"]
            latent = torch.sigmoid(gate) * latent
        logits = logits + weights["markov_head.markov_w2.weight"] @ latent
    return logits


def plain_confidence(kind: str, weights: dict[str, Tensor], state: Tensor, before: int) -> float:
    """What the confidence head says of a row behind the token `before`, 1 where there is none."""
    if not kind.startswith("dspark"):
        return 1.0
    latent = weights["markov_head.markov_w1.weight"][before]
    both = torch.cat([state, latent]) if kind == "dspark gated" else state
    said = weights["confidence_head.proj.weight"][0] @ both + weights["confidence_head.proj.bias"][0]
    return float(torch.sigmoid(said))


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target: TargetWeights
) -> tuple[str, dict[str, Tensor], BlockHead]:
    kind = request.param
    weights = random_tensors(shapes(kind))
    path = write_checkpoint(tmp_path_factory.mktemp("block"), "model.safetensors", CONFIGS[kind], weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafters.heads.layers.multiplies", lambda dtype: False)
        return kind, weights, BlockHead.load(path, target)


TEXT = [3, 9, 14, 2, 33, 8, 21]
FEATURES = torch.randn(len(TEXT) - 1, len(READ), HIDDEN, generator=torch.Generator().manual_seed(5))


def opened(head: BlockHead) -> BlockSession:
    """A session that has read the text in two parts."""
    session = head.open([], 64, 0)
    session.commit(0, FEATURES[:4], TEXT[1:5])
    session.root()
    session.commit(4, FEATURES[4:], TEXT[5:])
    return session


def begun(head: BlockHead, known: list[int]) -> tuple[BlockSession, int]:
    """A session that has read the text, and the node at the end of a block's known tokens."""
    session = opened(head)
    [[node]] = head.begin([(session, [known])])
    return session, node


def check_blocks_alone_and_together(head: BlockHead, paths: list[list[int]]) -> None:
    """Compare the outputs of blocks of one forward with those of a forward of each block alone."""
    together = opened(head)
    head.begin([(together, paths)])
    for path in paths:
        alone, _ = begun(head, path)
        for one, other in zip(outputs_of(alone, path), outputs_of(together, path), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def rows_of(
    kind: str, weights: dict[str, Tensor], target: TargetWeights, known: list[int]
) -> tuple[Tensor, Tensor, int]:
    """The block's states, the output matrix, and the row that predicts the token behind the root."""
    embedding = weights.get("embed_tokens.weight", target.embedding)
    block = [TEXT[-1], *known] + [MASK] * (SIZE - 1 - len(known))
    states = plain_states(weights, embedding, FEATURES, block, kind == "jetspec")
    return states, weights.get("lm_head.weight", target.lm_head), 0 if kind.startswith("dspark") else 1


def outputs_of(session: BlockSession, known: list[int]) -> Outputs:
    """The outputs of the block that begins with these tokens."""
    [block] = [block for block in session.blocks if block.known == tuple(known)]
    rows = slice(block.row, block.row + block.rows)
    return Outputs(*(part[rows] for part in block.forward.outputs))


@torch.inference_mode()
@pytest.mark.parametrize("known", [[], [11], [11, 4]])
def test_a_block_drafts_what_a_plain_forward_over_the_text_gives(
    pair: tuple[str, dict[str, Tensor], BlockHead], target: TargetWeights, known: list[int]
) -> None:
    kind, weights, head = pair
    states, lm_head, first = rows_of(kind, weights, target, known)
    session, node = begun(head, known)
    ranking = Ranking(SamplingParams(), head.target_ids, 5)
    path = [TEXT[-1], *known]
    for row in range(first + len(known), SIZE):
        expected = plain_logits(kind, weights, lm_head, states[row], path[-1]).softmax(-1).topk(5)
        sure = plain_confidence(kind, weights, states[row], path[-1])
        seen = session.rank(ranking, [node], None, [])
        assert seen.tokens[0] == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(seen.prob[0]), expected.values * sure, atol=1e-4, rtol=1e-3)
        path.append(seen.tokens[0][row % 2])  # not always the likeliest
        [node], _ = session.extend([node], path[-1:])


@torch.inference_mode()
def test_the_confidence_head_says_what_a_plain_product_gives(
    pair: tuple[str, dict[str, Tensor], BlockHead], target: TargetWeights
) -> None:
    kind, weights, head = pair
    states, _, _ = rows_of(kind, weights, target, [])
    if not kind.startswith("dspark"):
        assert head.confidence is None
        return
    assert head.confidence is not None
    for token in (5, 6):
        said = head.confidence.prob(head.outputs(head.output(states)).sure.numpy(), np.full(SIZE, token))
        plain = [plain_confidence(kind, weights, state, token) for state in states]
        assert said.tolist() == pytest.approx(plain, abs=1e-5)


@torch.inference_mode()
def test_blocks_begun_together_are_those_begun_alone(pair: tuple[str, dict[str, Tensor], BlockHead]) -> None:
    check_blocks_alone_and_together(pair[2], [[11], [4, 4], [], [30]])


@torch.inference_mode()
def test_branches_of_a_tree_differ_by_their_links(
    pair: tuple[str, dict[str, Tensor], BlockHead],
) -> None:
    kind, _, head = pair
    session, _ = begun(head, [])
    ranking = Ranking(SamplingParams(), head.target_ids, 5)
    first, second = session.rank(ranking, [0], None, []).tokens[0][:2]
    nodes, _ = session.extend([0, 0], [first, second])
    seen = session.rank(ranking, nodes, None, [])
    assert (seen.prob[0] != seen.prob[1]) == kind.startswith("dspark")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_of_a_block_follows_the_likeliest_path_and_ends_with_the_block(
    pair: tuple[str, dict[str, Tensor], BlockHead], temperature: float
) -> None:
    _, _, head = pair
    drafter = HeadDrafter(head, Adaptive(budget=40, top_k=4, mu=0.0))
    drafter.start(1, TEXT[:-1], SamplingParams(temperature=temperature, max_tokens=20))
    assert drafter.feature_layers == (2, 4)  # what enters layer 2 has left layer 1, which the file names
    drafter.observe(1, Verdict(TokenTree.root_only(TEXT[-2]), [0], [TEXT[-1]], bfloat16_bits(FEATURES)))
    trees = drafter.propose_many([(1, path) for path in ([], [5], [5, 6])])
    assert drafter.steps == 1  # one forward for all, whatever the trees grow to
    assert [int(tree.tokens[0]) for tree in trees] == [TEXT[-1], 5, 6]
    for known, tree in enumerate(trees):
        assert 4 < len(tree) <= 40
        assert 1 < int(tree.depths.max()) <= head.depth - known
        above = tree.confidence[tree.parents[1:]]
        assert (tree.confidence[1:] <= above + 1e-6).all()


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_vocabulary_is_linked_with_any_token_before_it(
    temperature: float, tmp_path: Path, target: TargetWeights
) -> None:
    head = block(tmp_path, target)
    session = opened(head)
    ranking = Ranking(SamplingParams(temperature=temperature, seed=4), head.target_ids, 5)
    head.begin([(session, [[], [11]])])
    assert head.link is not None and head.confidence is not None
    for known, before in (([], 0), ([], 49), ([11], 3)):  # 0 and 49 are no tokens of the draft vocabulary
        [[node]] = head.begin([(session, [known])])
        [node], _ = session.extend([node], [before])
        seen = session.rank(ranking, [node], None, [])
        logits, gates, said = (part[1:2].float() for part in outputs_of(session, known))
        assert head.link.gate is not None
        gate = torch.sigmoid(gates + head.link.gate.of_token[before].float())
        logits = logits + (gate * head.link.first[before].float()) @ head.link.second.T.float()
        scores = ranking.scores(logits, [len(TEXT) + 1 + len(known)])
        sure = head.confidence.prob(said.numpy(), np.array([before]))[0]
        expected = scores.softmax(-1)[0].topk(5)
        assert seen.tokens[0] == head.target_ids[expected.indices].tolist()
        torch.testing.assert_close(torch.tensor(seen.prob[0]), expected.values * sure, atol=1e-5, rtol=1e-2)


@torch.inference_mode()
def test_only_a_rows_candidates_are_linked(
    tmp_path: Path, target: TargetWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.heads.one_pass.block_weights.CANDIDATES", 8)
    head = block(tmp_path, target)
    session = opened(head)
    session.root()
    seen = session.rank(Ranking(SamplingParams(), head.target_ids, 5), [0], None, [])
    logits, gates, said = (part[:1].float() for part in outputs_of(session, []))
    assert head.link is not None and head.link.gate is not None and head.confidence is not None
    linked = (torch.sigmoid(gates + head.link.gate.of_token[TEXT[-1]]) * head.link.first[TEXT[-1]]) @ head.link.second.T
    candidates = logits.topk(8).indices
    expected = logits.scatter_add(1, candidates, linked.gather(1, candidates))
    for _ in range(2):
        torch.testing.assert_close(session.root_logits(), expected, atol=1e-5, rtol=1e-4)
    prob = expected.softmax(-1)[0]
    best = candidates[0][prob[candidates[0]].argsort(descending=True)][:5]
    assert seen.tokens[0] == head.target_ids[best].tolist()
    sure = float(head.confidence.prob(said.numpy(), np.array([TEXT[-1]]))[0])
    assert seen.prob[0] == pytest.approx((sure * prob[best]).tolist(), abs=1e-5)


def test_layouts_that_cannot_be_drafted_with_are_refused_by_key(tmp_path: Path, target: TargetWeights) -> None:
    weights = random_tensors(shapes("dspark"))
    config = CONFIGS["dspark"]
    for changes, message in (
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn' is not supported"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "layer_types names 1 layers of 2"),
        ({"target_layer_ids": "all"}, "is not a list of layers"),
        ({"target_layer_ids": [1, 9]}, "target has 6 layers"),
    ):
        path = write_checkpoint(tmp_path / message[:8], "model.safetensors", {**config, **changes}, weights)
        with pytest.raises(ModelError, match=message):
            BlockHead.load(path, target)
