"""Hydra (arXiv 2402.05109): Medusa's heads made sequential; each also reads the tokens drafted before it.

Public layout, `hydra_lm_head.pt`: `hydra_mlp.{i}.{j}.linear|res_connection` and `hydra_lm_head.{i}`; the numbers j
skip the places of dropout modules, and output matrices may be inside one (`hydra_lm_head.{i}.1`). The first block of
head i is res_connection(x) + SiLU(linear(x)) over x = [hidden state, embeddings of the last token and the i drafted
ones]; later blocks are x + SiLU(linear(x)). Supported: `hydra_head_arch: mlp` with `grounded_heads`. Heads trained here
may share the target's output matrix (`"tie_lm_head": true`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import WEIGHT_FILES, Checkpoint, TargetWeights
from drafters.heads.growth.policies import MEDUSA_63, Static
from drafters.heads.head import Head
from drafters.heads.layers import Linear, draft_dtype
from drafters.heads.session import Session


@dataclass(frozen=True)
class _Tower:
    """One head: its blocks as (linear, res_connection or identity), and its output matrix."""

    blocks: list[tuple[Linear, Linear | None]]
    output: Linear

    def logits(self, x: Tensor) -> Tensor:
        """x: [n, (2 + i) * hidden] -> [n, vocab]."""
        for linear, residual in self.blocks:
            x = (x if residual is None else residual(x)) + F.silu(linear(x))
        return self.output(x)


class HydraHead(Head):
    """Guesses the token after a path from the hidden state before the path and the path's embeddings."""

    method = "hydra"
    published_growth = Static(MEDUSA_63)

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, device: torch.device):
        self.device, self.dtype = device, draft_dtype(device)
        config, hidden = checkpoint.config, target.hidden_size
        if (arch := config.get("hydra_head_arch", "mlp")) != "mlp":
            raise checkpoint.error(f"config.json: hydra_head_arch={arch!r} is not supported, only 'mlp' is")
        if not config.get("grounded_heads", True):
            raise checkpoint.error("config.json: grounded_heads=false is not supported: such heads are Medusa's")
        if config.get("hidden_state_offset", 0) != 0:
            raise checkpoint.error("config.json: hidden_state_offset other than 0 is not supported")
        self.count, layers = checkpoint.number("hydra_num_heads", 4), checkpoint.number("hydra_num_layers", 1)
        checkpoint.match("hidden size", checkpoint.number("hidden_size", hidden), hidden)
        checkpoint.match("vocabulary", checkpoint.number("vocab_size", target.vocab_size), target.vocab_size)
        self.feature_layers = (target.layers,)
        self.target_ids = torch.arange(target.vocab_size, device=device)
        self.embedding = target.embedding.to(device, self.dtype)
        names = [name.removeprefix("hydra_head.") for name in checkpoint.tensors]
        checkpoint.tensors = dict(zip(names, checkpoint.tensors.values(), strict=True))

        def linear(name: str, out: int, inputs: int) -> Linear:
            bias = checkpoint.take_optional(f"{name}.bias", out)
            weight = checkpoint.take(f"{name}.weight", out, inputs)
            return Linear(weight.to(device, self.dtype), None if bias is None else bias.to(device, self.dtype))

        shared = Linear(target.lm_head.to(device, self.dtype)) if config.get("tie_lm_head", False) else None
        self.towers = []
        for i in range(self.count):
            indices = sorted(
                {int(m[1]) for name in names if (m := re.match(rf"hydra_mlp\.{i}\.(\d+)\.linear\.", name))}
            )
            if len(indices) != layers:
                raise checkpoint.error(f"head {i} has {len(indices)} blocks hydra_mlp.{i}.*.linear, not {layers}")
            blocks: list[tuple[Linear, Linear | None]] = []
            for j in indices:
                width = (2 + i) * hidden if j == indices[0] else hidden
                residual = linear(f"hydra_mlp.{i}.{j}.res_connection", hidden, width) if j == indices[0] else None
                blocks.append((linear(f"hydra_mlp.{i}.{j}.linear", hidden, width), residual))
            nested = f"hydra_lm_head.{i}.1.weight" in checkpoint.tensors
            output = shared or linear(
                f"hydra_lm_head.{i}.1" if nested else f"hydra_lm_head.{i}", target.vocab_size, hidden
            )
            self.towers.append(_Tower(blocks, output))
        checkpoint.finish()

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> HydraHead:
        files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt", *WEIGHT_FILES)
        return cls(Checkpoint(path, "hydra", files), target, torch.device(device))

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> HydraSession:
        return HydraSession(self, scratch)


class HydraSession(Session):
    """A node holds its depth and its head's input: the last true feature and the embeddings along its path."""

    def __init__(self, head: HydraHead, scratch: int):
        self.head, self.depth_limit, self.scratch = head, head.count, scratch
        self.depth: list[int] = []
        self.inputs: list[Tensor] = []

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        root = F.embedding(torch.tensor(tokens[-1], device=self.head.device), self.head.embedding)
        self.inputs, self.depth = [torch.cat([features[-1, 0].to(self.head.dtype), root])], [0]
        self.synced = start + len(tokens)

    def root(self) -> Tensor:
        return self.head.towers[0].logits(self.inputs[0][None])

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor]:
        first, head = len(self.depth), self.head
        embeddings = F.embedding(torch.tensor(tokens, device=head.device), head.embedding)
        for parent, embedding in zip(parents, embeddings, strict=True):
            self.inputs.append(torch.cat([self.inputs[parent], embedding]))
            self.depth.append(self.depth[parent] + 1)
        nodes = list(range(first, len(self.depth)))
        logits = embeddings.new_empty(len(nodes), head.embedding.shape[0])
        for depth in sorted({self.depth[node] for node in nodes}):  # one unless several outcomes are drafted at once
            rows = [row for row, node in enumerate(nodes) if self.depth[node] == depth]
            logits[rows] = head.towers[depth].logits(torch.stack([self.inputs[nodes[row]] for row in rows]))
        return nodes, logits

    def room(self) -> int:
        return self.scratch - (len(self.depth) - 1)

    def clear(self) -> None:
        del self.inputs[1:], self.depth[1:]
