"""DSpine (SpecForge's `dspine`): after each layer a row of a block is told what the row before it predicts, and each
row's likeliest tokens are scored again behind the token that the row before has become.

A row's *feature* is its state, projected into the space of the tokens' codes and given their length. Of the feature of
the row before it, or of the code of a token that is known there, a row's state takes the message

    sigmoid(receives @ feature + gates @ before) * (message @ before)

which `writes` projects, times the state's root mean square. The states that the last layer's message is added to are
kept: in a tree it is made again of the code of each node's token, and the row's likeliest tokens get the scores of the
state with that message. As a score is <output, norm(state + writes @ message)>, it follows from the first one by
`output * norm @ writes`, a table with few numbers a token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.layers import Linear, RMSNorm, small_dtype
from drafters.heads.matrices import HeadTensors, Matrix, rows_of
from drafters.heads.top import Floats, Integers

_AT_ONCE = 4096  # rows of the output matrix


class SpineSizes(NamedTuple):
    """rank: numbers of a feature. message: numbers of a message. candidates: likeliest tokens that are scored again."""

    rank: int
    message: int
    candidates: int


class Spine:
    """What DSpine adds to the layers of a head. size: rows of a block."""

    def __init__(self, tensors: HeadTensors, sizes: SpineSizes, layers: int, hidden: int, vocab: int, size: int):
        """Take the tensors."""
        rank, message = sizes.rank, sizes.message
        self.length, self.hidden, self.message, self.size = math.sqrt(rank), hidden, message, size
        own = tensors.under("injection.")
        self.readouts = [Linear(own.matrix(f"readouts.{i}.weight", rank, hidden)) for i in range(layers)]
        writes = [own.vector(f"writes.{i}.weight", hidden, message) for i in range(layers)]
        sends = torch.cat([own.vector(f"{name}.weight", message, rank) for name in ("message", "predecessor_gate")])
        bias = F.pad(own.vector("bias", message), (message, 0))
        self.writes, self.sends = [Linear(weight) for weight in writes], Linear(sends, bias)
        self.receives = Linear(own.matrix("receiver_gate.weight", message, rank))
        codes = self.length * tensors.vector("transfer_codes", vocab, rank)
        self.of_token = F.linear(codes, sends, bias).to("cpu", small_dtype(codes.device))
        self._write = writes[-1].float().cpu()
        self._of_output, self._eps = torch.empty(0), 0.0

    def reads_outputs(self, norm: RMSNorm, output: Matrix) -> None:
        """Compute the table of tokens for the second score. output: the output matrix, [draft_vocab, hidden]."""
        weight, parts = self._write * norm.weight.float().cpu()[:, None], torch.arange(output.shape[0]).split(_AT_ONCE)
        self._of_output = torch.cat(
            [(rows_of(output, part).float().cpu() @ weight).to(self.of_token) for part in parts]
        )
        self._eps = float(norm.eps)

    def inject(self, layer: int, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that leave a layer, and what the second score needs of them, [rows, hidden + 2 * message].
        x: [rows, hidden], of whole blocks; tokens: [rows], less than 0 where they are not known.
        """
        read = self.readouts[layer](x)
        feature = (self.length * F.normalize(read.float(), dim=-1)).to(x.dtype)
        sent, received, known = self.sends(feature), self.receives(feature), tokens >= 0
        sent[known] = self.of_token[tokens[known].cpu()].to(sent)
        before = F.pad(sent.unflatten(0, (-1, self.size))[:, :-1], (0, 0, 1, 0)).flatten(0, 1)
        message = self._message(received, before)
        made = x + _size(x).to(x.dtype) * self.writes[layer](message)
        return made, torch.cat([x, received, message], dim=1)

    def change(self, kept: Floats, logits: Tensor, ids: Integers, before: Integers) -> Floats:
        """Return [n, candidates]: what to add to the candidates' logits once the token before them is known. The sum of
        their exponentials stays the same. kept: [n, hidden + 2 * message], what is kept of their rows. ids:
        [n, candidates], in the draft vocabulary. before: [n], the tokens before them.
        """
        state, received, own = torch.from_numpy(kept).split([self.hidden, self.message, self.message], dim=1)
        message = self._message(received, self.of_token[torch.from_numpy(before)].float())
        table = self._of_output[torch.from_numpy(ids)].float()
        moved = _size(state) * (table @ (message - own)[:, :, None])[:, :, 0]
        scores = (logits * self._norm_size(state, own) + moved) / self._norm_size(state, message)
        apart = scores.logsumexp(1, keepdim=True) - logits.logsumexp(1, keepdim=True)
        return np.ascontiguousarray((scores - logits - apart).numpy())

    def _message(self, received: Tensor, before: Tensor) -> Tensor:
        message, gate = before.split(self.message, dim=1)
        return torch.sigmoid(received + gate) * message

    def _norm_size(self, state: Tensor, message: Tensor) -> Tensor:
        """Return what the norm divides by a state that has taken the message."""
        told = state + _size(state) * F.linear(message, self._write)
        return (_size(told).square() + self._eps).sqrt()


def _size(x: Tensor) -> Tensor:
    """Return [rows, 1]: the root mean square."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32) / math.sqrt(x.shape[-1])
