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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import WEIGHT_FILES, Checkpoint, TargetWeights
from drafters.heads.growth.policies import MEDUSA_63, Static
from drafters.heads.head import Head
from drafters.heads.layers import Linear, draft_dtype
from drafters.heads.matrices import numbers
from drafters.heads.medusa import ROWS
from drafters.heads.session import JointSession
from engine.device import uploaded
from engine.model.cuda.graphs import RecordedRows


@dataclass(frozen=True)
class _Tower:
    """One head: its blocks as (linear, res_connection or identity), and its output matrix."""

    blocks: list[tuple[Linear, Linear | None]]
    output: Linear

    def __call__(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor]:
        """Return [n, vocab]. features: [n, hidden]; embeddings: [n, (1 + i) * hidden]."""
        x = torch.cat([features, embeddings], dim=1)
        for linear, residual in self.blocks:
            x = (x if residual is None else residual(x)) + F.silu(linear(x))
        return (self.output(x),)


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
        self.embedding = numbers(target.embedding).to(device, self.dtype)
        tensors = checkpoint.tensors_for(device, self.dtype)
        names = [name.removeprefix("hydra_head.") for name in checkpoint.tensors]
        checkpoint.tensors = dict(zip(names, checkpoint.tensors.values(), strict=True))

        def linear(name: str, out: int, inputs: int) -> Linear:
            bias = tensors.vector(f"{name}.bias", out) if checkpoint.has(f"{name}.bias") else None
            return Linear(tensors.matrix(f"{name}.weight", out, inputs), bias)

        shared = Linear(tensors.joined(target.lm_head)) if config.get("tie_lm_head", False) else None
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
        self._recorded = [RecordedRows(partial(self._logits, tower), device, ROWS) for tower in self.towers]
        checkpoint.finish()

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> HydraHead:
        files = ("hydra_lm_head.safetensors", "hydra_lm_head.pt", *WEIGHT_FILES)
        return cls(Checkpoint(path, "hydra", files), target, torch.device(device))

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        return list(self._after([(session, 0) for session in sessions]).split(1))

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        added = [session.add(parents, tokens) for session, parents, tokens in asked]
        logits = self._after([(one[0], node) for one, nodes in zip(asked, added, strict=True) for node in nodes])
        return [*zip(added, logits.split(list(map(len, added))), strict=True)]

    def _after(self, nodes: Sequence[tuple[HydraSession, int]]) -> Tensor:
        """Return [nodes, vocab]: the logits after nodes of sessions; the next call overwrites them."""
        paths = [session.paths[node] for session, node in nodes]
        number = {session: i for i, session in enumerate(dict.fromkeys(session for session, _ in nodes))}
        features = torch.stack([session.feature for session in number])
        logits = features.new_empty(0)
        depths = sorted({len(path) for path in paths})  # there is one depth unless several outcomes are drafted at once
        for depth in depths:
            rows = [row for row, path in enumerate(paths) if len(path) == depth]
            tokens = torch.tensor([paths[row] for row in rows])
            (own,) = uploaded([torch.tensor([number[nodes[row][0]] for row in rows])], features.device)
            (found,) = self._recorded[depth - 1](features.index_select(0, own), tokens)
            if len(depths) == 1:
                return found
            logits = logits if len(logits) else found.new_empty(len(nodes), found.shape[1])
            logits[rows] = found
        return logits

    def _logits(self, tower: _Tower, features: Tensor, tokens: Tensor) -> tuple[Tensor]:
        """Return a tower's logits. features: [n, hidden]; tokens: [n, 1 + i]."""
        return tower(features, F.embedding(tokens, self.embedding).flatten(1))

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> HydraSession:
        return HydraSession(self, scratch)


class HydraSession(JointSession):
    """A node is the tokens of its path, the text's last token first; its head also reads the last true feature."""

    def __init__(self, head: HydraHead, scratch: int):
        self.head, self.depth_limit, self.scratch = head, head.count, scratch
        self.feature = torch.empty(0, dtype=head.dtype)  # [hidden]
        self.paths: list[tuple[int, ...]] = []

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        self.feature, self.paths = features[-1, 0].to(self.head.dtype), [(tokens[-1],)]
        self.synced = start + len(tokens)

    def add(self, parents: list[int], tokens: list[int]) -> list[int]:
        """Add nodes, and return their numbers."""
        first = len(self.paths)
        self.paths += [(*self.paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return list(range(first, len(self.paths)))

    def room(self) -> int:
        return self.scratch - (len(self.paths) - 1)

    def clear(self) -> None:
        del self.paths[1:]
