"""A checkpoint that is quantised as it is loaded: on the lean decoder, proved layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.config import Config
from engine.core.batch import Segment
from engine.core.errors import ConfigError, ModelError
from engine.core.params import SamplingParams
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.product import multiplies
from engine.kernels.layer.weights import ExpertMlp
from engine.model.decoder import LeanDecoder
from engine.model.loading import load_model
from engine.model.memory import check_memory
from engine.model.target import Target
from engine.weights.checkpoint import CheckpointTensor
from engine.weights.quantised import quantised_folder
from engine.weights.quantised_weights import open_quantised
from tests.conftest import VOCABULARY, save_tiny_llama, tiny_tokenizer
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.tiny_families import EXPERTS, FAMILIES, IN_BOTH, STATES, STOCK, build

pytestmark = pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor")
KINDS = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
WITH_EXPERTS = (EXPERTS | {family for family in STATES if "experts" in family} | {"qwen3-next"}) - {"gpt-oss"}
CPU = torch.device("cpu")
TEXT = list(range(5, 45))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """Save a tiny checkpoint of a family in float32."""

    def save(family: str = "llama", **changes: Any) -> str:
        build(family, "float32", vocab_size=VOCABULARY, **changes).save_pretrained(tmp_path / "tiny")
        tiny_tokenizer().save_pretrained(tmp_path / "tiny")
        return str(tmp_path / "tiny")

    return save


def loaded(checkpoint: str, weights: str = "q8_0", **options: Any) -> Target:
    return Target.load(quantised_folder(checkpoint, weights), device="cpu", kv_memory=1 << 22, **options)


def logits(target: Target) -> torch.Tensor:
    """Return [tokens, vocab]: how far rows of 8 bits take a single row is another matter on each processor."""
    return target.run([Segment.of_text(TEXT, target.new_cache(len(TEXT)), wanted="all")])[0].float()


def stock_logits(path: str) -> torch.Tensor:
    """Return the logits of transformers' forward in float32, [tokens, vocab]."""
    with torch.inference_mode():
        found: torch.Tensor = load_model(path, "float32", CPU)(torch.tensor([TEXT]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("weights", KINDS)
def test_matrices_are_quantised_as_llama_cpp_does_and_vectors_stay(
    checkpoint: Callable[..., str], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.weights.quantised_weights._AT_ONCE", 1024)  # several parts of each matrix
    path = checkpoint("qwen2")
    own = load_model(path, "float32", CPU).state_dict()
    for name, found in load_model(quantised_folder(path, weights), "auto", CPU).state_dict().items():
        expected = own[name] if own[name].dim() == 1 else requantised(own[name], weights)
        assert torch.equal(found, expected.bfloat16()), name


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (one not in {"qwen3.5 with experts", "granite 4 with experts"}))
        for one in sorted(WITH_EXPERTS)
    ],
)
def test_experts_are_quantised_and_what_chooses_them_is_not(checkpoint: Callable[..., str], family: str) -> None:
    path = checkpoint(family)
    own = load_model(path, "float32", CPU).state_dict()
    for name, found in load_model(quantised_folder(path, "q4_1"), "auto", CPU).state_dict().items():
        if ".experts." in name:
            assert torch.equal(found, requantised(own[name], "q4_1").bfloat16()), name
        elif name.endswith(("gate.weight", "router.weight", "router.proj.weight")):
            assert torch.equal(found, own[name].bfloat16()), name


def requantised(numbers: torch.Tensor, weights: str) -> torch.Tensor:
    """Return what llama.cpp's rule leaves of numbers."""
    kind = Kind[weights.upper()]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(numbers.numpy(), kind), kind))


@pytest.mark.parametrize("weights", KINDS)
def test_the_lean_decoder_runs_it_and_agrees_with_the_stock_forward(
    checkpoint: Callable[..., str], weights: str
) -> None:
    path = checkpoint()
    target = loaded(path, weights)
    assert isinstance(target.forward, LeanDecoder) and target.exact and target.weights == weights
    expected = stock_logits(quantised_folder(path, weights))
    assert (logits(target) - expected).norm() < 0.1 * expected.norm()


OF_A_KIND = {"phi3", "gemma2", "gemma4 with inputs of layers", "gemma4 whose keys are values", "phi", "youtu"}
OF_A_KIND |= {"granite 4", "nemotron-h", "falcon-h1", "lfm3", "bamba", "mixtral", "qwen3.5 with experts"}
"""Families whose matrices are joined, shared or missing, of layers with a state, and of experts; the others have names
like these."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (family not in OF_A_KIND))
        for family in sorted(FAMILIES.keys() - STOCK - {"llama", "qwen2", "gpt-oss"})
    ],
)
def test_every_family_of_the_lean_decoder_can_be_quantised(checkpoint: Callable[..., str], family: str) -> None:
    """With experts, of which rounding may choose others, most rows have the stock forward's logits."""
    inputs = {"vocab_size_per_layer_input": VOCABULARY} if "inputs" in family else {}
    path = checkpoint(family, **inputs)
    expected = stock_logits(quantised_folder(path, "q8_0"))
    for activations in ("bfloat16", "int8") if family in IN_BOTH else ("int8",):
        target = loaded(path, activations=activations)
        assert isinstance(target.forward, LeanDecoder) and target.exact
        assert target.activations == activations or not instruction_sets()
        squares = (logits(target) - expected).pow(2).mean(1) / expected.pow(2).mean()
        assert (squares.median() if family in WITH_EXPERTS else squares.mean()).sqrt() < 0.1
        experts = [mlp for layer in target.forward.layers if isinstance(mlp := layer.weights.mlp, ExpertMlp)]
        assert bool(experts) == (family in WITH_EXPERTS)
        assert all(product.coded for mlp in experts for product in [*mlp.gate_up, *mlp.down])


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_held_once(checkpoint: Callable[..., str], tied: bool) -> None:
    path = checkpoint(tie_word_embeddings=tied)
    target = loaded(path, "q4_1")
    forward = target.forward
    assert isinstance(forward, LeanDecoder) and forward.head.matmul is not None
    assert (forward.embedding in forward.head.matmul.tiled) == tied
    expected = stock_logits(quantised_folder(path, "q4_1"))
    assert (logits(target) - expected).norm() < 0.1 * expected.norm()


def test_matrices_whose_rows_are_not_whole_blocks_stay_numbers(checkpoint: Callable[..., str]) -> None:
    path = checkpoint(intermediate_size=112)
    own = load_model(path, "float32", CPU).model.layers[1].mlp.down_proj.weight
    found = load_model(quantised_folder(path, "q4_0"), "auto", CPU).model.layers[1].mlp.down_proj.weight
    assert torch.equal(found, own.bfloat16())
    assert isinstance(loaded(path, "q4_0").forward, LeanDecoder)


def test_few_numbers_are_in_memory_at_a_time(checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(intermediate_size=1024)
    counts, usual = list[int](), CheckpointTensor.numbers
    monkeypatch.setattr(CheckpointTensor, "numbers", lambda *args: counts.append(args[2]) or usual(*args))
    monkeypatch.setattr("engine.weights.quantised_weights._AT_ONCE", 256)
    loaded(path)
    assert max(counts) == 1024  # a row


def test_a_pass_of_the_proof_is_remembered_beside_the_checkpoint_and_not_in_it(checkpoint: Callable[..., str]) -> None:
    path = checkpoint()
    loaded(path)
    assert (Path(quantised_folder(path, "q8_0")) / "proof-bfloat16.msgpack").is_file()
    assert not (Path(path) / "proof-bfloat16.msgpack").exists()


def test_what_cannot_be_run_with_quantised_weights_is_refused_in_one_line(checkpoint: Callable[..., str]) -> None:
    for family in ("gpt-oss", "phi with norms of heads"):
        with pytest.raises(
            ModelError, match=r"^weights=q8_0: this model cannot be run with quantised wei.* \(.*\); leave"
        ):
            loaded(checkpoint(family))
    config = Config(model=quantised_folder(checkpoint(), "q8_0"), weights="q8_0", device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match=r"^weights=q8_0: quantised weights are multiplied by CPUs in bfloat16, and"):
        Target.of_config(config)


@pytest.mark.parametrize(
    ("name", "bad", "told"),
    [
        ("layers.1.mlp.up_proj", float("nan"), r"tensor {} holds NaN or infinity; get the file again"),
        ("norm", float("inf"), r"tensor {} holds NaN or infinity; get the file again"),
        ("layers.1.mlp.up_proj", None, r"\({} is not stored under its name\)"),
    ],
)
def test_numbers_that_are_none_or_missing_are_one_line(
    checkpoint: Callable[..., str], name: str, bad: float | None, told: str
) -> None:
    path = checkpoint()
    file, tensor = Path(path) / "model.safetensors", f"model.{name}.weight"
    tensors = load_file(file)
    if bad is None:
        del tensors[tensor]
    else:
        tensors[tensor].view(-1)[-1] = bad
    save_file(tensors, file)
    with pytest.raises(ModelError, match=told.format(tensor)):
        loaded(path)


def test_too_little_memory_names_the_type_that_fits(checkpoint: Callable[..., str]) -> None:
    stored = open_quantised(Path(quantised_folder(checkpoint(hidden_size=256), "q8_0")))
    assert stored is not None
    needed = int(1.05 * stored.size) + 600_000_000
    check_memory(stored, "model=x", needed)
    with pytest.raises(ModelError, match=r"^model=x: the model as q8_0, of .* take weights=q5_1 \(.* GB\), or free"):
        check_memory(stored, "model=x", needed - 1000)


async def test_drafts_change_no_text_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    path = save_tiny_llama(tmp_path / "tiny", hidden_size=64)
    asked = [(prompt, SamplingParams(max_tokens=32, temperature=t, seed=3)) for t in (0.0, 1.0) for prompt in PROMPTS]
    options = {"weights": "q4_1", "device": "cpu", "verifier.kv_memory": 1 << 22}
    async with tiny_engine(path, path, "none", **options) as engine:
        plain = [await engine.generate(*one) for one in asked]
        assert engine.target.weights == "q4_1"
    assert plain[0].metrics.weights == "q4_1" and plain[0].metrics.exact
    async with tiny_engine(path, path, "suffix", **options) as engine:
        found = await asyncio.gather(*(engine.generate(*one) for one in asked))
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
