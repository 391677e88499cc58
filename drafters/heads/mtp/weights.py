"""The weights of a model's own draft head, read from a GGUF file in the file's bits or from safetensors.

The head is one more layer of the model, after a matrix that joins the embedding of a token with the target's state
before it. Its structure is read from a stock model of one layer, so experts and gated attention are as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig

from drafters.heads.checkpoint import TargetWeights, find_folder
from drafters.heads.matrices import rows_of
from drafters.heads.mtp.own_tokens import OwnTokens, RowsOf, likely_tokens
from engine.core.errors import DrafterMismatch, ModelError, first_line
from engine.kernels.gemm.product import Product, multiplies
from engine.kernels.layer.weights import Norm
from engine.kernels.quant.layouts import STEP
from engine.kernels.quant.nearest import nearest
from engine.kernels.quant.stored import StoredMatrix
from engine.model.decoder_layer import Layer, Parameters, made_norm
from engine.model.loading import eos_tokens, load_config, skeleton
from engine.model.reader.decoder import describe
from engine.model.structure import DecoderStructure, NormStructure, OtherStructure
from engine.weights.draft_head import PREFIX, head_block
from engine.weights.gguf.families import located
from engine.weights.gguf.file import GgufFile, read_gguf
from engine.weights.gguf.source import open_gguf
from engine.weights.gguf.weights import GgufWeights
from engine.weights.quantised import unquantised
from engine.weights.stored_weights import Unreadable

_EMBEDDING, _OUTPUT, _NORM = "token_embd.weight", "output.weight", "output_norm.weight"
_OWN = {"embed_tokens": _EMBEDDING, "shared_head_head": _OUTPUT, "shared_head_norm": _NORM}
"""Tensors of the head that replace the model's, by their names after `nextn.`"""
_JOIN, _JOIN_NORMS = "eh_proj", ("enorm", "hnorm")
_STORED = {"model.layers.0.": f"{PREFIX}layers.0.", "model.norm.": f"{PREFIX}norm."}


@dataclass(frozen=True)
class MtpWeights:
    """join: of the normed embedding and the normed state, one after the other. embed: the embeddings [n, hidden] of
    tokens [n]. head: the output matrix of the tokens `own.target_ids`.
    """

    structure: DecoderStructure
    layer: Layer
    join: Product
    embedding_norm: Norm
    state_norm: Norm
    norm: Norm
    embed: Callable[[Tensor], Tensor]
    head: Product
    own: OwnTokens


def read_mtp(model: str, path: str, vocabulary: int) -> MtpWeights:
    """Read the head of a target. model: the target's directory. path: the GGUF file or directory with the head.
    vocabulary: the most tokens that it drafts. Raises ModelError or DrafterMismatch.
    """
    if not multiplies(torch.bfloat16):
        raise ModelError("method=mtp: products of bfloat16 are not there on this processor; take method=suffix")
    folder = find_folder(model, "model")
    config = _one_layer(load_config(str(folder)))
    field = f"drafter.path={path}"
    file = read_gguf(Path(path), field) if Path(path).is_file() else open_gguf(find_folder(path, "drafter.path"))
    size = config.get_text_config().vocab_size
    likely = likely_tokens(size, vocabulary, ends_of(folder, size))
    try:
        if file is not None:
            return _of_gguf(file, folder, config, field, likely)
        return _of_safetensors(find_folder(path, "drafter.path"), folder, config, field, likely)
    except (Unreadable, OtherStructure, AttributeError) as error:
        raise ModelError(f"{field}: its draft head cannot be read ({first_line(error)}); take method=suffix") from error


def _one_layer(config: Any) -> Any:
    """Return the configuration of a model whose only layer is like the head's."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 1, ["full_attention"]
    return config


def ends_of(folder: Path, vocabulary: int) -> set[int]:
    """Return the tokens that end an answer."""
    try:
        return {token for token in eos_tokens(GenerationConfig.from_pretrained(folder)) if token < vocabulary}
    except OSError:  # a directory without one
        return set()


def output_of(rows_of: RowsOf, likely: tuple[list[int], int]) -> tuple[Product, OwnTokens]:
    """Return the output matrix, and the tokens that its outputs stand for. likely: see `likely_tokens`."""
    ids, stay = torch.tensor(likely[0]), likely[1]
    head = Product([rows_of(ids.numpy())])
    return head, OwnTokens(head, rows_of, ids, stay)


def _of_gguf(file: GgufFile, folder: Path, config: Any, field: str, likely: tuple[list[int], int]) -> MtpWeights:
    block, heads = head_block(file), file.metadata.get(f"{file.architecture}.nextn_predict_layers", 0)
    if block is None:
        raise ModelError(
            f"{field}: holds no draft head ({file.architecture}.nextn_predict_layers is {heads}); name a file that has "
            "one as drafter.path, or take method=suffix"
        )
    if heads != 1:
        raise DrafterMismatch(f"{field}: {file.architecture}.nextn_predict_layers is {heads}, and a head of 1 is read")
    text = config.get_text_config()
    embedding, join = file.tensor(_EMBEDDING), file.tensor(f"{block}nextn.{_JOIN}.weight")
    if embedding is None or join is None:
        raise ModelError(f"{field}: has no tensor {_EMBEDDING}; get the file again")
    _match(field, "vocabulary", embedding.shape[1], text.vocab_size)
    _match(field, "hidden size", join.shape[1], text.hidden_size)
    view = _head_alone(file, block)
    text.tie_word_embeddings = view.tensor(_OUTPUT) is None
    model = skeleton(str(folder), config)
    weights, whole = GgufWeights(view, *located(view, model)), GgufWeights(file, {}, {})
    norms = []
    for name in _JOIN_NORMS:
        values = file.values(f"{block}nextn.{name}.weight")
        if values is None:
            raise ModelError(f"{field}: has no tensor {block}nextn.{name}.weight; get the file again")
        norms.append(torch.from_numpy(values.copy()))
    structure = describe(model, weights)
    [output] = weights.places["lm_head.weight"].tensors
    head, own = output_of(lambda ids: weights.some_rows(output, ids), likely)
    epsilon = structure.norm.epsilon
    return MtpWeights(
        structure=structure,
        layer=_layer(structure, weights),
        join=Product([whole.rows(join.name)]),
        embedding_norm=Norm(norms[0], epsilon),
        state_norm=Norm(norms[1], epsilon),
        norm=made_norm(structure.norm, weights.vector(structure.norm.weight)),
        embed=lambda tokens: weights.numbers(_EMBEDDING, tokens.numpy()),
        head=head,
        own=own,
    )


def _head_alone(file: GgufFile, block: str) -> GgufFile:
    """Return a view of the file in which the head's layer is the only one."""
    view = GgufFile(file.parts, file.key)
    view.metadata = file.metadata | {f"{file.architecture}.{key}": n for key, n in _COUNTS.items()}
    shared = {name: tensor for name in _OWN.values() if (tensor := file.tensor(name)) is not None}
    for name, shared_name in _OWN.items():
        if (own := file.tensor(f"{block}nextn.{name}.weight")) is not None:
            shared[shared_name] = replace(own, name=shared_name)
    layer = [
        replace(tensor, name=f"blk.0.{tensor.name.removeprefix(block)}")
        for tensor in file.tensors
        if tensor.name.startswith(block) and ".nextn." not in tensor.name
    ]
    view.tensors = [*shared.values(), *layer]
    return view


_COUNTS = {"block_count": 1, "nextn_predict_layers": 0}


def _layer(structure: DecoderStructure, parameters: Parameters) -> Layer:
    return Layer(structure.layers[0], parameters, "bfloat16", torch.bfloat16)


class _Stored:
    """The head's tensors in safetensors, by the names of a model of one layer. Matrices get 8 bits a number, as every
    head's: a draft step takes as long as reading them.
    """

    def __init__(self, tensors: dict[str, Tensor], field: str):
        self.tensors, self.field = tensors, field

    def _found(self, name: str) -> Tensor:
        for model, stored in _STORED.items():
            if name.startswith(model):
                name = stored + name.removeprefix(model)
        if name not in self.tensors:
            raise ModelError(f"{self.field}: tensor {name} is missing; copy the directory again")
        return self.tensors[name].to(torch.bfloat16)

    def vector(self, name: str) -> Tensor:
        return self._found(name)

    def matrix(self, name: str) -> StoredMatrix:
        return coded(self._found(name))

    def experts(self, name: str, parts: int = 0) -> Sequence[Sequence[StoredMatrix]]:
        return [[coded(matrix)] for matrix in self._found(name)]


def coded(matrix: Tensor) -> StoredMatrix:
    """Return the matrix rounded to 8 bits, or as it is if 32 does not divide its inputs."""
    return nearest(matrix) if matrix.shape[1] % STEP == 0 else StoredMatrix.of_numbers(matrix)


def _of_safetensors(head: Path, folder: Path, config: Any, field: str, likely: tuple[list[int], int]) -> MtpWeights:
    tensors = _mtp_tensors(unquantised(head), field)
    if not tensors:
        raise ModelError(
            f"{field}: holds no draft head (no tensor named {PREFIX}*); name a directory or a GGUF file that has one "
            "as drafter.path, or take method=suffix"
        )
    target, text = TargetWeights.read(str(folder)), config.get_text_config()
    stored = _Stored(tensors, field)
    join = stored.vector(f"{PREFIX}fc.weight")
    _match(field, "hidden size", len(join), text.hidden_size)
    structure = describe(skeleton(str(folder), config))
    output, own = output_of(
        lambda ids: coded(rows_of(target.lm_head, torch.from_numpy(ids)).to(torch.bfloat16)), likely
    )
    embedding_norm, state_norm = (
        made_norm(NormStructure("", structure.norm.epsilon, structure.norm.adds_one), stored.vector(name))
        for name in (f"{PREFIX}pre_fc_norm_embedding.weight", f"{PREFIX}pre_fc_norm_hidden.weight")
    )
    return MtpWeights(
        structure=structure,
        layer=_layer(structure, stored),
        join=Product([coded(join)]),
        embedding_norm=embedding_norm,
        state_norm=state_norm,
        norm=made_norm(structure.norm, stored.vector(structure.norm.weight)),
        embed=lambda tokens: rows_of(target.embedding, tokens).to(torch.bfloat16),
        head=output,
        own=own,
    )


def _mtp_tensors(folder: Path, field: str) -> dict[str, Tensor]:
    """Return the head's tensors, from all files of the directory."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(PREFIX)]  # noqa: SIM118 (not a dict)
                found |= {name: opened.get_tensor(name).clone() for name in names}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{field}: {file.name} cannot be read ({first_line(error)}): copy it again") from None
    return found


def _match(field: str, what: str, mine: int, target: int) -> None:
    if mine != target:
        raise DrafterMismatch(
            f"drafter {what} {mine} != target {what} {target} ({field}): name the head of this very model, or take "
            "method=suffix"
        )
