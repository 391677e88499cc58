"""Proofs that another file, version or writer left are no proofs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from engine.kernels.attention.attention import Rule
from engine.kernels.layer.activation import Activation
from engine.model.loading import Facts
from engine.model.rotary import Frequencies
from engine.model.structure import (
    AttentionStructure,
    DecoderStructure,
    ExpertsStructure,
    GatedDeltaStructure,
    LayerStructure,
    LinearStructure,
    MlpStructure,
    NormStructure,
    Picked,
    ShortConvolutionStructure,
)
from engine.model.trial import proof as proofs
from engine.model.trial.proof import Proof, ProvedModel
from engine.weights.gguf.source import GgufSource
from engine.weights.stored_weights import Place

LINEAR = LinearStructure(("a.weight", "b.weight"), ("a.bias", ""), (Picked(4, (0, 2, 1, 3)), None))
NORM = NormStructure("norm.weight", 1e-5, True)
MLP = MlpStructure(LINEAR, LINEAR, Activation.GELU)
MLPS = MLP, ExpertsStructure(LINEAR, "gate_up", "down", 4, 32, 2, False, True, "bias", 2.0, shared=MLP)
MIXERS = (
    AttentionStructure(LINEAR, LINEAR, 4, 2, 8, NORM, NORM, 8, 1, True, 1e-6, True, True, 0),
    GatedDeltaStructure(LINEAR, LINEAR, "conv", "decay", False, "dt", NORM, LINEAR, 1, 2, 16, 32, 4, (0, 0)),
    ShortConvolutionStructure(LINEAR, "conv", "", LINEAR, 3),
)
LAYERS = tuple(LayerStructure(mixer, mlp, NORM, None, NORM, None, (0.5, 1.0, 0.5)) for mixer in MIXERS for mlp in MLPS)
FREQUENCIES = Frequencies(tuple(torch.tensor([1.0, 0.1]).tolist()), 0.7)
STRUCTURE = DecoderStructure(64, 32, (FREQUENCIES,), LAYERS, NORM, LINEAR, "embedding", True, 2.0, 3.0, 30.0)
RULES = {0: Rule(0.25, 12, 30.0, torch.tensor([1.0, 2.0])), 1: Rule(0.5)}
FACTS = Facts(64, 2, 512, 256, frozenset([1, 2]), {"top_k": 20, "top_p": None}, ["num_beams=2"])
PLACES = {"a.weight": Place(("q", "k"), (2, 3), b"12", b"34")}
VECTORS = {"norm": torch.tensor([0.1]).bfloat16(), "conv": torch.tensor([[0.1, 0.2], [0.3, 0.4]])}
PROVED = ProvedModel(FACTS, STRUCTURE, RULES, PLACES, VECTORS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    GgufSource("x.gguf", 1, "content").write(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def proof(folder: Path, dtype: str = "auto") -> Proof:
    return Proof(folder, dtype, "bfloat16", "auto")


def test_what_was_found_is_read_again(folder: Path) -> None:
    proof(folder).write(PROVED)
    found = proof(folder).read()
    assert found is not None and found.rules[1] == RULES[1] and found.rules[0].window == 12
    assert found.rules[0].sinks is not None and found.rules[0].sinks.tolist() == [1.0, 2.0]
    assert (found.facts, found.structure, found.places) == (FACTS, STRUCTURE, PROVED.places)
    assert found.vectors.keys() == {"norm", "conv"}
    for name, vector in found.vectors.items():
        assert vector.dtype == PROVED.vectors[name].dtype and torch.equal(vector, PROVED.vectors[name])
    assert proof(folder, "bfloat16").read() is None, "of another type"


@pytest.mark.parametrize("edited", ["config.json", "generation_config.json", "source.json"])
def test_what_the_folder_says_of_the_model_may_not_change(folder: Path, edited: str) -> None:
    proof(folder).write(PROVED)
    (folder / edited).write_text('{"other": 1}')
    assert proof(folder).read() is None


def test_a_proof_of_other_code_or_of_another_version_is_none(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> bool:
        proofs._versions.cache_clear()
        return proof(folder).read() is not None

    proof(folder).write(PROVED)
    engine, usual = tmp_path_factory.mktemp("copy") / "engine", proofs.version
    shutil.copytree(proofs._ENGINE, engine, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(proofs, "_ENGINE", engine)
    assert found()
    for part in proofs._COMPARED:
        file = next((engine / part).rglob("*.py"))
        content = file.read_text()
        file.write_text(f"{content}# edited\n")
        assert not found(), part
        file.write_text(content)
    for library in proofs._LIBRARIES:
        monkeypatch.setattr(proofs, "version", lambda name, other=library: "9.9" if name == other else usual(name))
        assert not found(), library
    monkeypatch.undo()
    assert found()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"\xff",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    ],
    ids=["nothing", "another", "cut", "longer", "one bit"],
)
def test_a_damaged_proof_is_none(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    proof(folder).write(PROVED)
    file = folder / "proof-bfloat16.msgpack"
    file.write_bytes(damage(file.read_bytes()))
    assert proof(folder).read() is None


def test_a_proof_with_other_contents_is_none(folder: Path) -> None:
    made = proof(folder)
    proofs.write_checked(made._file, made._key, [msgspec.msgpack.encode({"facts": None})])
    assert made.read() is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    (folder / "proof-bfloat16.msgpack").mkdir()
    proof(folder).write(PROVED)
    assert proof(folder).read() is None


def test_the_verifier_imports_no_transformers() -> None:
    code = "import sys, engine.verifier.loop, engine.model.target; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
