"""Chooses how the products of a model in blocks take their rows, for `activations: auto`.

bfloat16 is the more precise, by ten times in divergence. 8 bits make few rows cheap, and all rows on a processor whose
bfloat16 is slow; with tiles (AMX) rows cost next to nothing in bfloat16. So the model's own matrices are timed in both.

The choice decides plain decoding's text. It is written down beside the proof, and neither a restart nor a busy machine
changes it: only another file or processor does, or deleting what was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import get_args

import torch

from engine.config import Activations
from engine.files.checked_file import Damaged, read_checked, write_checked
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.gemm.product import Product, multiplies
from engine.kernels.quant.layouts import STEP, has_layout, layout_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import features
from engine.model.trial.proof import described_by
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.header import GgufTensor
from engine.weights.packed_experts import a_part_of, packed_rows
from engine.weights.quantised_weights import QuantisedCheckpoint

_FILE = "activations.txt"
_LONGEST = 64  # more bytes than a name has
_ROUND_ROWS = (1, 4, 8, 16)
"""Rows of a usual round: one without a draft, more with a tree. Each of these counts as often as the others."""
_PROMPT_ROWS, _PROMPT_PART = 128, 7.5
"""Rows of a forward that reads a prompt, and how many of them there are for each round: a prompt has three tokens for
each token of its answer, and a round emits two and a half tokens.
"""
_CLEARLY = 0.85
"""The part of bfloat16's time that 8 bits may take at most to be worth their divergence."""
_SMALL = 32e6
"""Bytes of a model that is fast with both kinds."""
_MATRICES, _OUTPUTS = 6, 4096  # matrices that are timed, and at most so many outputs of each
_REPEATS = 5


_WIDEST = 16  # outputs for each input of a matrix that is no embedding


def activations_of(folder: Path, stored: GgufFile | QuantisedCheckpoint) -> Activations:
    """Return the choice for the model of a folder on this processor, which is made now if it was not before."""
    record = ActivationsRecord(folder)
    return record.read() or record.choose(stored)


class ActivationsRecord:
    """The file that holds the choice for one model. folder: as for a `Proof`."""

    def __init__(self, folder: Path):
        self._folder, self._file = folder, folder / _FILE
        processor = sorted(features())
        self._key = hashlib.sha256(repr((described_by(folder), processor)).encode()).digest()

    def read(self) -> Activations | None:
        """Return the choice; None if there is none."""
        try:
            room = memoryview(bytearray(_LONGEST))
            found = bytes(read_checked(self._file, self._key, room)).decode()
        except (OSError, Damaged, UnicodeDecodeError):
            return None
        return next((kind for kind in get_args(Activations) if kind == found), None)

    def choose(self, stored: GgufFile | QuantisedCheckpoint) -> Activations:
        """Choose by the model's speed and write it down. Where that is not possible, choose by the instructions alone,
        so that the next start does the same.
        """
        if os.access(self._folder, os.W_OK):
            chosen = faster(stored)
            with contextlib.suppress(OSError):
                write_checked(self._file, self._key, [chosen.encode()])
                return chosen
        return by_instructions(stored)


def by_instructions(stored: GgufFile | QuantisedCheckpoint) -> Activations:
    """Return the kind that is faster for most models of this type on this processor."""
    tiles = units()[:1] == (Unit.AMX,)
    return "int8" if has_choice(stored) and not tiles else "bfloat16"


def faster(stored: GgufFile | QuantisedCheckpoint) -> Activations:
    """Time the model's own matrices. Returns int8 if that is clearly faster, otherwise bfloat16."""
    if stored.size < _SMALL or not has_choice(stored):
        return "bfloat16"
    return preferred(_timed(_sample(stored)))


def has_choice(stored: GgufFile | QuantisedCheckpoint) -> bool:
    """Return whether most of its matrices can be multiplied by rows of 8 bits and by bfloat16 here."""
    ours = bool(instruction_sets()) and multiplies(torch.bfloat16)
    return ours and has_layout(stored.kind) and layout_of(stored.kind).coded


def preferred(seconds: Mapping[Activations, Mapping[int, float]]) -> Activations:
    """Choose by time. seconds: of forwards with each kind of activations, by their rows."""
    cost = {kind: usual_cost(by_rows) for kind, by_rows in seconds.items()}
    return "int8" if cost["int8"] <= _CLEARLY * cost["bfloat16"] else "bfloat16"


def usual_cost(seconds: Mapping[int, float]) -> float:
    """Return the seconds of a usual round with its part of a prompt. seconds: of forwards, by their rows."""
    rounds = sum(seconds[rows] for rows in _ROUND_ROWS) / len(_ROUND_ROWS)
    return rounds + seconds[_PROMPT_ROWS] * _PROMPT_PART / _PROMPT_ROWS


def _sample(stored: GgufFile | QuantisedCheckpoint) -> list[StoredMatrix]:
    """Return some of the large matrices of the type that most are of, without embeddings; of experts a few."""
    read: dict[Callable[[], StoredMatrix], tuple[int, ...]] = {}  # with the shape of each
    if isinstance(stored, QuantisedCheckpoint):
        for tensor in stored.tensors.values():
            if not stored.packed:
                read[partial(stored.matrix, tensor)] = tensor.shape
            elif part := a_part_of(tensor):
                read[partial(packed_rows, part, stored.tensors)] = tensor.shape[1], STEP * tensor.shape[2]
    else:
        for one in stored.tensors:
            if one.kind.name == stored.kind and has_layout(stored.kind):
                read[partial(_read, stored, one)] = one.shape[1::-1]
    usual = {make: prod(shape) for make, shape in read.items() if len(shape) == 2 and shape[0] <= _WIDEST * shape[1]}
    large = [make for make, size in usual.items() if 2 * size >= max(usual.values())]
    count = min(_MATRICES, len(large))
    return [large[i * len(large) // count]().row_slice(0, _OUTPUTS) for i in range(count)]


def _read(stored: GgufFile, tensor: GgufTensor) -> StoredMatrix:
    return StoredMatrix.of(tensor.kind.name, stored.read(tensor), tensor.shape[0])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@torch.inference_mode()
def _timed(matrices: Sequence[StoredMatrix]) -> dict[Activations, dict[int, float]]:
    """Return the least seconds of all products with each kind of activations, by rows. The kinds take turns. One
    thread's own time counts: what else the machine does hardly changes that.
    """
    products = {kind: [Product([matrix], activations=kind) for matrix in matrices] for kind in get_args(Activations)}
    found: dict[Activations, dict[int, float]] = {kind: {} for kind in products}
    with _one_thread():
        for rows in (*_ROUND_ROWS, _PROMPT_ROWS):
            inputs = [torch.randn(rows, matrix.shape[1], dtype=torch.bfloat16) for matrix in matrices]
            for repeat in range(1 + _REPEATS):  # the first repeat compiles
                for kind, some in products.items():
                    begin = time.thread_time()
                    for product, x in zip(some, inputs, strict=True):
                        product(x)
                    took = time.thread_time() - begin
                    found[kind][rows] = min(took, found[kind].get(rows, took)) if repeat else inf
    return found
