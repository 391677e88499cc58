"""Centroids narrow an output matrix: a row's logits are those of the tokens near its nearest centroids alone."""

from __future__ import annotations

import torch
from torch import Tensor

_NONE = -1e4  # the logit of a token that is near none of them: its probability is 0


class Centroids:
    """centroids: [count, hidden]. near: [count, tokens of each] int64, tokens by the centroid that they are near.
    output: [vocab, hidden], of which rows are kept by centroid. nearest: how many a row takes.
    """

    def __init__(self, centroids: Tensor, near: Tensor, output: Tensor, nearest: int):
        self.centroids, self.near, self.nearest = centroids, near, nearest
        self._rows = output[near]
        self._vocabulary = len(output)

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [rows, vocab] float32. x: [rows, hidden]."""
        chosen = (x @ self.centroids.T).topk(self.nearest, dim=1).indices
        logits = torch.full((len(x), self._vocabulary), _NONE, dtype=torch.float32)
        for row, of_row, out in zip(x, chosen, logits, strict=True):
            out[self.near[of_row].flatten()] = (self._rows[of_row].flatten(0, 1) @ row).float()
        return logits
