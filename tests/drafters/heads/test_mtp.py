"""A model's own draft head: what it computes is what its layer computes in transformers, from each kind of file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafters.heads.mtp.head import MtpHead
from drafters.heads.mtp.own_tokens import likely_tokens
from drafters.heads.mtp.weights import read_mtp
from drafters.parts import parts
from engine import SamplingParams
from engine.config import load
from engine.core.drafter_protocol import Verdict
from engine.core.errors import DrafterMismatch, ModelError
from engine.core.tree import TokenTree
from engine.kernels.gemm.product import multiplies
from engine.model.runner import bfloat16_bits
from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.resolve import with_own
from tests.conftest import tiny_tokenizer
from tests.drafters.heads.layouts.head_gguf import write_described
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.weights.family_gguf import draft_head, random_model, write_family

pytestmark = [
    pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor"),
    pytest.mark.usefixtures("no_gradients"),
]
FAMILY, LENGTH = "qwen3.5", 12


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(FAMILY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Any) -> dict[str, Path]:
    """The model with its head: a checkpoint, and a GGUF file that is described."""
    return stored(tmp_path_factory.mktemp("stored"), FAMILY, model)


def stored(folder: Path, family: str, model: Any) -> dict[str, Path]:
    made = {kind: folder / kind for kind in ("safetensors", "gguf")}
    model.save_pretrained(made["safetensors"])
    tiny_tokenizer().save_pretrained(made["safetensors"])
    file = made["safetensors"] / "model.safetensors"
    save_file(load_file(file) | draft_head(model), file, metadata={"format": "pt"})
    made["gguf"].mkdir()
    write_described(made["gguf"], family, model, head=draft_head(model))
    return made


class Reference:
    """The head by transformers' own layer, in float32: it reads a text from its first pair on."""

    def __init__(self, model: Any):
        self.model, self.head = model, draft_head(model)
        config = type(model.config)(
            **model.config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        )
        self.layer = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        names = {name.replace("mtp.", "model."): tensor for name, tensor in self.head.items()}
        names |= {"lm_head.weight": model.lm_head.weight, "model.embed_tokens.weight": model.model.embed_tokens.weight}
        self.layer.load_state_dict(names, strict=False)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.head[f"mtp.pre_fc_norm_{name}.weight"])

    def __call__(self, states: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """The normed output after the last pair, and the logits."""
        embedded = self._normed(self.model.model.embed_tokens(torch.tensor(tokens)), "embedding")
        x = torch.cat([embedded, self._normed(states, "hidden")], dim=1) @ self.head["mtp.fc.weight"].T
        state = self.layer.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
        return state, self.layer.lm_head(state)


def check_chain(folder: str, model: Any) -> None:
    """Draft a chain with a sibling beside each node, and compare its logits with those of the layer in transformers."""
    weights, reference = read_mtp(folder, folder, 100), Reference(model)
    session = MtpHead(weights, model.config.num_hidden_layers).open([0], 64, 32)
    torch.manual_seed(2)
    states = torch.randn(LENGTH, model.config.hidden_size).to(torch.bfloat16)
    text = [(5 * i) % 90 for i in range(LENGTH)]
    session.commit(0, states[:, None], text)
    found, path, tokens, node = session.root_logits()[0], states.float(), text, 0
    for _ in range(3):
        state, logits = reference(path, tokens)
        expected = logits[weights.own.target_ids]
        assert float((found.float() - expected).std() / expected.std()) < 0.1
        token, other = int(expected.argmax()), 7
        nodes, both = session.extend([node, node], [other, token])  # only the second goes on
        assert both is not None
        path, tokens = torch.cat([path, state[None]]), [*tokens, token]
        found, node = both[1], nodes[1]


@pytest.mark.parametrize("family", [FAMILY, "qwen3.5 with experts", "qwen3-next"])
def test_a_chain_and_its_siblings_get_the_logits_of_the_layer_in_transformers(tmp_path: Path, family: str) -> None:
    model = random_model(family)
    for folder in stored(tmp_path, family, model).values():
        check_chain(str(folder), model)


def test_the_drafted_vocabulary_is_trimmed_to_the_lowest_ids_and_the_ends(folders: dict[str, Path]) -> None:
    weights = read_mtp(str(folders["gguf"]), str(folders["gguf"]), 100)
    assert len(weights.own.target_ids) == weights.head.outputs == 100
    assert sorted(weights.own.target_ids.tolist()) == [*range(100)]  # which hold the end, token 3
    assert 3 in read_mtp(str(folders["gguf"]), str(folders["gguf"]), 16).own.target_ids.tolist()
    assert read_mtp(str(folders["gguf"]), str(folders["gguf"]), 10**6).head.outputs == 262


def test_the_tokens_that_stay_are_the_lowest_and_the_ends() -> None:
    ids, stay = likely_tokens(1000, 100, {3, 999})
    assert stay == 64 and ids[:stay] == [*range(63), 999] and ids[stay:] == [*range(98, 62, -1)]
    assert likely_tokens(50, 100, {3}) == ([*range(50)], 50)
    assert likely_tokens(99, 16, {3}) == ([*range(16)], 16)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_tokens_of_a_text_are_drafted_from_then_on_in_place_of_those_seen_longest_ago(
    folders: dict[str, Path], kind: str
) -> None:
    folder = str(folders[kind])
    trimmed, whole = (read_mtp(folder, folder, size) for size in (100, 10**6))
    x, own = torch.randn(3, 64).to(torch.bfloat16), trimmed.own
    before = own.target_ids.tolist()
    own.enter([5, 200, 201, 5, 200])
    after = own.target_ids.tolist()
    assert [(old, new) for old, new in zip(before, after, strict=True) if old != new] == [(99, 200), (98, 201)]
    own.enter(range(150, 200))
    assert {*own.target_ids.tolist()[64:]} == {*range(164, 200)} and own.target_ids.tolist()[:64] == before[:64]
    assert torch.equal(trimmed.head(x), whole.head(x)[:, own.target_ids])
    whole.own.enter([0, 261])
    assert whole.own.target_ids.tolist() == [*range(262)]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
async def test_texts_that_the_models_own_head_drafts_are_those_of_plain_decoding(
    folders: dict[str, Path], kind: str
) -> None:
    asked = [
        (prompt, SamplingParams(max_tokens=24, temperature=temperature, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 1.0)
    ]
    texts = {}
    for name in ("none", "mtp", "hybrid", "pld"):
        options = {"method": name, "drafter.path": None, "transport": "inproc", "verifier.kv_memory": 1 << 24}
        options |= {"verifier.cut": False} if name in ("mtp", "hybrid") else {}
        async with tiny_engine(str(folders[kind]), "", **options) as engine:
            results = [await engine.generate(*one) for one in asked]
            assert engine.target.head == ("mtp" if name in ("mtp", "hybrid") else "")
        texts[name] = [result.token_ids for result in results]
        assert all(result.metrics.exact for result in results)
    assert all(text == texts["none"] for text in texts.values())


def test_a_hybrid_drafts_with_the_head_that_its_model_brings(
    folders: dict[str, Path], tmp_path: Path, tiny: str
) -> None:
    for folder in folders.values():
        asked = load({"model": str(folder), "method": "hybrid"})
        assert parts(with_own(asked)) == ("mtp", "suffix")
        assert parts(with_own(load(asked, {"drafter.head": "eagle3"}))) == ("eagle3", "suffix")
    assert parts(with_own(load({"model": tiny, "method": "hybrid"}))) == ("eagle3", "suffix")


def test_a_head_alone_in_a_file_is_named_as_path(folders: dict[str, Path], tmp_path: Path, model: Any) -> None:
    file = tmp_path / "mtp-x.gguf"
    write_family(file, FAMILY, model, Kind.Q8_0, draft_head(model), head_alone=True)
    alone, beside = (read_mtp(str(folders["gguf"]), path, 100) for path in (str(file), str(folders["gguf"])))
    x = torch.randn(3, 64).to(torch.bfloat16)
    assert torch.equal(alone.head(x), beside.head(x))
    with pytest.raises(ModelError, match=r"holds a draft head alone; name it as drafter.path"):
        describe(read_gguf(file, "model=x"), tmp_path, "x", "")


def test_a_file_without_a_head_is_refused_with_the_field(folders: dict[str, Path], tmp_path: Path, model: Any) -> None:
    file = write_described(tmp_path, FAMILY, model)
    with pytest.raises(ModelError, match=r"drafter.path=.*x.gguf: holds no draft head \(qwen35.nextn_predict_layers"):
        read_mtp(str(folders["gguf"]), str(file), 100)
    shutil.copy(folders["gguf"] / "config.json", tmp_path / "config.json")
    (tmp_path / "source.json").unlink()
    with pytest.raises(ModelError, match=r"holds no draft head \(no tensor named mtp"):
        read_mtp(str(folders["gguf"]), str(tmp_path), 100)


@pytest.mark.parametrize(
    ("changes", "metadata", "problem"),
    [
        ({"hidden_size": 32}, {}, r"drafter hidden size 32 != target hidden size 64 \(drafter.path="),
        ({"vocab_size": 288}, {}, r"drafter vocabulary 288 != target vocabulary 262 \(drafter.path="),
        ({}, {"nextn_predict_layers": 2}, r"qwen35.nextn_predict_layers is 2, and a head of 1"),
    ],
)
def test_a_head_of_another_model_or_of_several_layers_is_refused_with_the_field(
    changes: dict[str, int], metadata: dict[str, int], problem: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    other, file = random_model(FAMILY, **changes), tmp_path / "x.gguf"
    write_family(file, FAMILY, other, Kind.F32, draft_head(other), metadata)
    with pytest.raises(DrafterMismatch, match=problem):
        read_mtp(str(folders["gguf"]), str(file), 100)


def test_features_are_read_once_when_a_verdict_brings_them_and_their_tokens_are_drafted(
    folders: dict[str, Path],
) -> None:
    folder = str(folders["gguf"])
    drafter = MtpHead.from_config(
        load({"model": folder, "method": "mtp", "drafter": {"path": None, "vocabulary": 100}})
    )
    head = drafter.head
    assert isinstance(head, MtpHead) and 240 not in head.target_ids.tolist()
    drafter.start(1, [1, 2, 3], SamplingParams(max_tokens=8))
    features = bfloat16_bits(torch.randn(3, 1, 64))
    drafter.observe(1, Verdict(TokenTree.root_only(3), [0], [240], features))
    assert drafter.count_unread(1) == 3
    tree = drafter.propose(1)
    assert len(tree) > 1 and drafter.count_unread(1) == 0 and np.all(tree.tokens < 262)
    assert 240 in head.target_ids.tolist()
