"""A model that a head foretells and earlier answers do not, prompts for it and a small recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.command import talon

CYCLE, FIRST = 251, 4  # tokens that follow each other, the first of which is w4
VOCABULARY = CYCLE + FIRST + 1
PROMPTS = 60
_SHOWN = 3  # tokens of a prompt
RECIPE: dict[str, Any] = {
    "method": "block", "answer_tokens": 16, "length": 28, "batch": 16, "anchors": 12, "lr": 1e-2, "warmup": 5,
    "unroll": 5, "layers": 1, "markov_rank": 8, "draft_vocab_size": VOCABULARY, "evaluate_every": 5, "held_out": 8,
}  # fmt: skip


def text_from(start: int, length: int) -> list[int]:
    """Return a prompt in its chat form, and the answer behind it: a walk around the cycle."""
    walk = [FIRST + (start + 7 * step) % CYCLE for step in range(length - 2)]
    return [1, *walk[:_SHOWN], 2, *walk[_SHOWN:]]


@pytest.fixture(scope="session")
def walker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a Llama that goes on walking around the cycle, with a tokenizer whose words are w0, w1, ..."""
    folder = tmp_path_factory.mktemp("walker")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=3,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    texts = torch.tensor([text_from(start, 30) for start in range(CYCLE)])
    for step in range(160):
        batch = texts[torch.randperm(CYCLE, generator=torch.Generator().manual_seed(step))[:32]]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w3")
    fast.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what is made in a folder of the test's own."""
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Write prompts, of which one in three is a chat."""
    file, lines = tmp_path / "prompts.jsonl", []
    for number in range(PROMPTS):
        asked = " ".join(f"w{token}" for token in text_from(4 * number, 10)[1 : 1 + _SHOWN])
        chat = [{"role": "user", "content": asked}]
        lines.append({"messages": chat} if number % 3 == 0 else {"prompt": asked})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tune.yaml"
    file.write_text(json.dumps(RECIPE))
    return file


Tune = Callable[..., Result]


@pytest.fixture
def tune(walker: str, prompts: Path, recipe: Path) -> Tune:
    """Run the command on the walker, whose forwards take a simulated time: with a longer one a good head pays."""

    def run(*options: str, model: str = walker, latency_ms: int = 1) -> Result:
        given = ("--prompts", str(prompts), "--recipe", str(recipe), "--hours", "0.004", "--at-once", "8")
        sets = (f"model={model}", "transport=inproc", f"verifier.simulated_latency_ms={latency_ms}")
        return talon("tune", *given, *(part for one in sets for part in ("--set", one)), *options)

    return run
