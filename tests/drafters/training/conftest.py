"""A target that can chat, prompts for it and small recipes."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.training.run import train
from drafters.training.score import Score
from tests.drafters.conftest import LAYERS, LLAMA, VOCAB

METHODS = ["block", "eagle", "eagle3", "medusa", "hydra", "sps"]
SMALL: dict[str, Any] = {
    "prompts": 12, "held_out": 4, "answer_tokens": 12, "answer_batch": 4, "length": 24, "steps": 6, "batch": 3,
    "lr": 3e-3, "warmup": 2, "heads": 3, "blocks": 2, "unroll": 2,
    "hidden_size": 16, "attention_heads": 2, "evaluate_every": 3, "anchors": 5, "markov_rank": 8,
}  # fmt: skip
Training = Callable[..., Score]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a target with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chatty")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=LAYERS, tie_word_embeddings=True, eos_token_id=3))
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() == 2 else 1
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w3")
    fast.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl.xz"
    with lzma.open(path, "wt") as file:
        for i in range(14):
            file.write(json.dumps({"prompt": f"w{4 + i} w{5 + 2 * i} w{60 - i}", "completion": ""}) + "\n")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    def write(method: str, **changes: Any) -> Path:
        path = tmp_path / f"{method}.yaml"
        vocabulary = {"draft_vocab_size": 40} if method in ("block", "eagle3") else {}
        path.write_text(json.dumps({"method": method, **SMALL, **vocabulary, **changes}))
        return path

    return write


@pytest.fixture
def trained(chatty: Path, data: Path, recipe: Callable[..., Path], tmp_path: Path) -> Training:
    """Train a head for the target into a folder of the test's own, with changes of the small recipe."""

    def run(method: str, out: str = "head", prompts: Path = data, plan: Any = (), **options: Any) -> Score:
        return train(method, str(chatty), prompts, tmp_path / out, recipe(method, **dict(plan)), **options)

    return run


def weights(out: Path) -> dict[str, Tensor]:
    """Return the weights of the last checkpoint."""
    state = torch.load(out / "training" / "state.pt", weights_only=True)
    return state["module"]  # type: ignore[no-any-return]


def tensors(head: Path) -> dict[str, Tensor]:
    """Return the tensors of a head's file."""
    [file] = head.glob("*.safetensors")
    return load_file(file)
