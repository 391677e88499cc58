"""Medusa-1 (arXiv 2401.10774): k heads on the target's last hidden state; head i guesses the token i + 1 places after
the next one, independently of the other heads.

Public layout, `medusa_lm_head.pt`: residual blocks `{i}.{j}.linear.weight|bias`, x + SiLU(Wx + b), and the output
matrix `{i}.{n}.weight` [vocab, h]. Heads trained here may share the target's output matrix instead of storing k of
their own; `"tie_lm_head": true` in their config says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import WEIGHT_FILES, Checkpoint, TargetWeights
from drafters.heads.growth.policies import MEDUSA_63, Static
from drafters.heads.head import Head
from drafters.heads.layers import Linear, draft_dtype
from drafters.heads.session import JointSession
from engine.model.cuda.graphs import RecordedRows

ROWS = (1, 4, 16, 64, 256, 1024)
"""Rows of a CUDA graph: one for each request, or each node of a layer of a tree."""


class MedusaHead(Head):
    """All heads' logits come from one call; a tree only chooses among them."""

    method = "medusa"
    published_growth = Static(MEDUSA_63)

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, device: torch.device):
        self.device, self.dtype = device, draft_dtype(device)
        self.count = checkpoint.number("medusa_num_heads", 5)
        blocks, hidden = checkpoint.number("medusa_num_layers", 1), target.hidden_size
        checkpoint.match("hidden size", checkpoint.number("hidden_size", hidden), hidden)
        checkpoint.match("vocabulary", checkpoint.number("vocab_size", target.vocab_size), target.vocab_size)
        self.feature_layers = (target.layers,)
        self.target_ids = torch.arange(target.vocab_size, device=device)
        # Files of a full training run hold the heads under this name.
        checkpoint.tensors = {name.removeprefix("medusa_head."): t for name, t in checkpoint.tensors.items()}
        tensors = checkpoint.tensors_for(device, self.dtype)
        width = next((t.shape[1] for name, t in checkpoint.tensors.items() if name == "0.0.linear.weight"), hidden)
        checkpoint.match("hidden size", width, hidden)
        self.blocks = [
            [
                Linear(
                    tensors.matrix(f"{i}.{j}.linear.weight", hidden, hidden),
                    tensors.vector(f"{i}.{j}.linear.bias", hidden),
                )
                for j in range(blocks)
            ]
            for i in range(self.count)
        ]
        self.outputs: list[Linear] = []
        if checkpoint.config.get("tie_lm_head", False):
            self.outputs = [Linear(tensors.joined(target.lm_head))] * self.count
        else:
            self.outputs = [
                Linear(tensors.matrix(f"{i}.{blocks}.weight", target.vocab_size, hidden)) for i in range(self.count)
            ]
        self._recorded = RecordedRows(self.logits, device, ROWS)
        checkpoint.finish()

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> MedusaHead:
        files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_FILES)
        return cls(Checkpoint(path, "medusa", files), target, torch.device(device))

    def logits(self, features: Tensor) -> tuple[Tensor]:
        """Return logits [n, heads, vocab] of features [n, hidden]."""
        rows = []
        for blocks, output in zip(self.blocks, self.outputs, strict=True):
            x = features
            for block in blocks:
                x = x + F.silu(block(x))
            rows.append((x, output))
        if len({id(output) for _, output in rows}) == 1:
            return (rows[0][1](torch.stack([x for x, _ in rows], dim=1).flatten(0, 1)).unflatten(0, (-1, self.count)),)
        return (torch.stack([output(x) for x, output in rows], dim=1),)

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        if lacking := [session for session in sessions if session.logits is None]:
            (logits,) = self._recorded(torch.cat([session.feature for session in lacking]))
            for session, own in zip(lacking, logits.clone(), strict=True):
                session.logits = own
        return [session.logits[:1] for session in sessions]

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> MedusaSession:
        return MedusaSession(self)


class MedusaSession(JointSession):
    """Only the last true feature counts; a node is only its depth, and each token of a continuation uses up a head."""

    def __init__(self, head: MedusaHead):
        self.head, self.depth_limit = head, head.count
        self.depth = [0]
        self.feature: Tensor | None = None  # [1, hidden]
        self.logits: Tensor | None = None  # [heads, vocab]

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        self.feature, self.logits = features[-1].to(self.head.dtype), None
        self.synced = start + len(tokens)
        self.clear()

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor]:
        assert self.logits is not None
        first, depths = len(self.depth), [self.depth[parent] + 1 for parent in parents]
        self.depth += depths
        one = len(set(depths)) == 1
        return list(range(first, len(self.depth))), self.logits[depths[0] : depths[0] + 1] if one else self.logits[
            depths
        ]

    def room(self) -> int:
        return 1 << 20

    def clear(self) -> None:
        self.depth = [0]
