"""Medusa-1 (arXiv 2401.10774): k heads on the target's last hidden state; head i guesses the token i + 1 places after
the next one, independently of the other heads.

Public layout, `medusa_lm_head.pt`: residual blocks `{i}.{j}.linear.weight|bias`, x + SiLU(Wx + b), and the output
matrix `{i}.{n}.weight` [vocab, h]. Heads trained here may share the target's output matrix instead of storing k of
their own; `"tie_lm_head": true` in their config says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import WEIGHT_FILES, Checkpoint, TargetWeights
from drafters.heads.growth.policies import MEDUSA_63, Static
from drafters.heads.head import Head
from drafters.heads.layers import Linear, draft_dtype
from drafters.heads.session import Session


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
        # files of a full training run put the heads under this name
        checkpoint.tensors = {name.removeprefix("medusa_head."): t for name, t in checkpoint.tensors.items()}

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.take(name, *shape).to(device, self.dtype)

        width = next((t.shape[1] for name, t in checkpoint.tensors.items() if name == "0.0.linear.weight"), hidden)
        checkpoint.match("hidden size", width, hidden)
        self.blocks = [
            [
                Linear(take(f"{i}.{j}.linear.weight", hidden, hidden), take(f"{i}.{j}.linear.bias", hidden))
                for j in range(blocks)
            ]
            for i in range(self.count)
        ]
        self.outputs: list[Linear] = []
        if checkpoint.config.get("tie_lm_head", False):
            self.outputs = [Linear(target.lm_head.to(device, self.dtype))] * self.count
        else:
            self.outputs = [Linear(take(f"{i}.{blocks}.weight", target.vocab_size, hidden)) for i in range(self.count)]
        checkpoint.finish()

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> MedusaHead:
        files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_FILES)
        return cls(Checkpoint(path, "medusa", files), target, torch.device(device))

    def logits(self, feature: Tensor) -> Tensor:
        """feature: [1, hidden] -> [heads, vocab]."""
        rows = []
        for blocks, output in zip(self.blocks, self.outputs, strict=True):
            x = feature
            for block in blocks:
                x = x + F.silu(block(x))
            rows.append((x, output))
        if len({id(output) for _, output in rows}) == 1:
            return rows[0][1](torch.cat([x for x, _ in rows]))
        return torch.cat([output(x) for x, output in rows])

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> MedusaSession:
        return MedusaSession(self)


class MedusaSession(Session):
    """Only the last true feature counts; a node is only its depth, and each token of a continuation uses up a head."""

    def __init__(self, head: MedusaHead):
        self.head, self.depth_limit = head, head.count
        self.depth = [0]
        self._feature: Tensor | None = None
        self._logits: Tensor | None = None

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        self._feature, self._logits = features[-1].to(self.head.dtype), None
        self.synced = start + len(tokens)
        self.clear()

    def root(self) -> Tensor:
        if self._logits is None:
            assert self._feature is not None
            self._logits = self.head.logits(self._feature)
        return self._logits[:1]

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor]:
        assert self._logits is not None
        first, depths = len(self.depth), [self.depth[parent] + 1 for parent in parents]
        self.depth += depths
        one = len(set(depths)) == 1
        return list(range(first, len(self.depth))), self._logits[depths[:1] if one else depths]

    def room(self) -> int:
        return 1 << 20

    def clear(self) -> None:
        self.depth = [0]
