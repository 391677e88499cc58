"""A GGUF file on the lean decoder, packed from the file and proved layer by layer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.core.errors import ModelError
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.gemm.product import multiplies
from engine.model import loading, memory
from engine.model import target as targets
from engine.model.decoder import LeanDecoder
from engine.model.loading import load_config, load_model, skeleton, weights_of
from engine.model.target import Target
from engine.model.trial import forward_choice
from engine.model.trial import proof as proofs
from engine.model.trial.stock_logits import LayeredStock, Offsets, WholeStock
from engine.weights.gguf.source import open_gguf
from engine.weights.gguf.weights import GgufWeights
from engine.weights.stored_weights import StoredWeights
from tests.engine.weights.tiny_gguf import TOKENS, described_gguf, write_gguf

pytestmark = pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor")
TEXT = list(range(5, 45))


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., str]:
    def make(**changes: Any) -> str:
        write_gguf(tmp_path / "tiny.gguf", **changes)
        return described_gguf(min(tmp_path.glob("tiny*.gguf")))

    return make


def unfilled(folder: str) -> tuple[Any, StoredWeights]:
    """The stock model without matrices, and what reads them."""
    gguf = open_gguf(Path(folder))
    assert gguf is not None
    model = skeleton(folder, load_config(folder))
    weights = weights_of(gguf, model)
    weights.fill_small(model)
    return model, weights


def logits(target: Target) -> torch.Tensor:
    return target.prefill(target.new_cache(len(TEXT)), TEXT)[0]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_every_parameter_is_what_transformers_reads(directory: Callable[..., str], kind: Kind) -> None:
    folder = directory(kind=kind)
    model, weights = unfilled(folder)
    theirs = dict(load_model(folder, "auto", torch.device("cpu")).named_parameters())
    for name, _ in model.named_parameters():
        assert torch.equal(weights.values(name), theirs.pop(name)), name
    assert not theirs


@torch.inference_mode()
def test_the_stock_forward_layer_by_layer_has_the_bits_of_the_whole(directory: Callable[..., str]) -> None:
    folder = directory(kind=Kind.Q8_0)
    model, weights = unfilled(folder)
    layered = LayeredStock(model, weights)
    offsets = [Offsets(), Offsets(200, 200), Offsets(0, 400)]
    found = layered(TEXT, offsets, 20)
    whole = WholeStock(load_model(folder, "auto", torch.device("cpu")), "tiny")
    for ours, theirs in zip(found, whole(TEXT, offsets, 20), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * float(theirs.std()))
    [rules] = layered.passed
    assert [(rules[layer].scale, rules[layer].window) for layer in (0, 1)] == [(0.25, 0)] * 2
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.dim() == 2), "nothing stays"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0])
def test_a_file_gives_the_bits_of_its_dequantised_weights(
    directory: Callable[..., str], monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    folder = directory(kind=kind)
    packed = Target.load(folder)
    assert isinstance(packed.forward, LeanDecoder) and packed.exact
    monkeypatch.setattr(targets, "open_stored", lambda folder: None)
    whole = Target.load(folder)
    assert isinstance(whole.forward, LeanDecoder)
    found, expected = logits(packed), logits(whole)
    if kind is Kind.F32 or units()[0] is Unit.AMX:
        assert torch.equal(found, expected)
    else:  # codes are multiplied as they are, and not rounded to bfloat16 with their scales
        assert (found - expected).float().norm() < 0.1 * expected.float().norm()


@pytest.mark.parametrize("dtype", ["auto", "float32"], ids=["lean", "dequantised whole"])
def test_a_file_in_parts_is_the_same_model(directory: Callable[..., str], tmp_path: Path, dtype: str) -> None:
    last = np.random.default_rng(0).standard_normal((len(TOKENS), 64), np.float32)
    whole = directory(kind=Kind.Q8_0, tensors={"output.weight": last})
    expected = logits(Target.load(whole, dtype))
    (tmp_path / "tiny.gguf").unlink()
    parts = directory(kind=Kind.Q8_0, tensors={"output.weight": last}, part_tensors=4)
    assert len([*tmp_path.glob("tiny-*.gguf")]) == 6
    assert not load_config(parts).tie_word_embeddings, "the output matrix is in the last part"
    target = Target.load(parts, dtype)
    assert isinstance(target.forward, LeanDecoder) and torch.equal(logits(target), expected)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that a model is tried."""
    noted: list[int] = []
    usual = forward_choice.ModelProbe
    monkeypatch.setattr(forward_choice, "ModelProbe", lambda *args: noted.append(1) or usual(*args))
    return noted


def test_a_pass_is_remembered_until_a_version_or_the_configuration_changes(
    directory: Callable[..., str], trials: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each kind of activations by itself."""
    folder = directory(kind=Kind.Q8_0)
    found = [logits(Target.load(folder)) for _ in range(2)]
    assert len(trials) == 1 and torch.equal(*found)
    for _ in range(2):
        Target.load(folder, activations="int8")
        Target.load(folder)
    assert len(trials) == 2
    with monkeypatch.context() as patch:
        patch.setattr(proofs, "_versions", lambda: ["transformers 0.1"])
        Target.load(folder)
    Target.load(folder)
    assert len(trials) == 4, "what the other version found is replaced"
    config = Path(folder) / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"rms_norm_eps": 0.5}))
    assert not torch.equal(logits(Target.load(folder)), found[0]) and len(trials) == 5
    config.write_text(json.dumps(values))
    assert torch.equal(logits(Target.load(folder)), found[0])


def test_a_later_start_needs_no_transformers_and_has_the_same_bits(directory: Callable[..., str]) -> None:
    folder = directory(kind=Kind.Q4_1)
    expected = logits(Target.load(folder))
    code = (
        "import sys, torch; from engine.model.target import Target\n"
        f"target = Target.load({folder!r}); torch.set_num_threads(1)\n"
        f"print(*target.prefill(target.new_cache(99), {TEXT!r})[0].tolist())\n"
        "sys.exit('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert [*map(float, done.stdout.split())] == expected.tolist()


def test_rows_in_a_wrong_order_are_not_taken(directory: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual = GgufWeights.matrix

    def unordered(self: GgufWeights, name: str) -> Any:
        matrix = usual(self, name)
        return matrix if matrix.order is None else type(matrix)(matrix.kind, matrix.raw)

    folder = directory(kind=Kind.Q8_0)
    with monkeypatch.context() as patch:
        patch.setattr(targets, "open_stored", lambda folder: None)
        expected = logits(Target.load(folder))
    model, weights = unfilled(folder)
    stock = LayeredStock(model, weights)
    monkeypatch.setattr(forward_choice, "LayeredStock", lambda *_: stock)
    right = {name: weights.values(name) for name, _ in model.named_parameters()}
    monkeypatch.setattr(weights, "values", right.__getitem__)
    monkeypatch.setattr(GgufWeights, "matrix", unordered)
    target = Target.load(folder)
    assert not (Path(folder) / "proof-bfloat16.msgpack").exists()
    assert torch.equal(logits(target), expected), "the stock weights are read instead"


def test_a_file_of_an_unknown_structure_is_refused_before_the_stock_forward_reads_it(
    directory: Callable[..., str], trials: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise forward_choice.OtherStructure("another norm")

    folder = directory(kind=Kind.Q8_0)
    monkeypatch.setattr(forward_choice, "describe", refuse)
    assert not isinstance(Target.load(folder).forward, LeanDecoder)
    assert len(trials) == 1, "that of the whole model"


def test_families_beyond_the_lean_decoder_run_the_stock_forward_where_it_fits(
    directory: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Linux would end the process, which says nothing."""
    folder = directory(kind=Kind.Q8_0)
    expected = logits(Target.load(folder))

    def refuse(*_: Any) -> None:
        raise forward_choice.OtherStructure("another norm")

    monkeypatch.setattr(LeanDecoder, "__init__", refuse)
    (Path(folder) / "proof-bfloat16.msgpack").unlink()
    for dtype in ("auto", "float32"):
        target = Target.load(folder, dtype)
        assert not isinstance(target.forward, LeanDecoder)
        assert target.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
        assert (logits(target) - expected).pow(2).mean().sqrt() < 0.1 * expected.std()
    stored = open_gguf(Path(folder))
    assert stored is not None
    monkeypatch.setattr(loading, "free_memory", lambda: memory._BESIDE + int(1.5 * stored.elements))
    with pytest.raises(ModelError, match="another norm"):
        Target.load(folder)
