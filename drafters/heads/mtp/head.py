"""A model's own draft head for multi-token prediction (MTP), trained with it and stored in its file.

It predicts the token after next: from the target's state after its output norm, and the embedding of the token that the
target drew from it. For the tokens after that it feeds on its own normed output. A step reads the head's layer and its
output matrix; the whole vocabulary's is as large as a small model, so it drafts over the likeliest tokens and those of
the texts (`own_tokens`), whose rows are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Dynamic, policy_of
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.layers import RMSNorm
from drafters.heads.mtp.weights import MtpWeights, read_mtp
from drafters.heads.pooled_session import PooledSession, PooledWeights
from drafters.heads.stack import Stack, StackSpec
from drafters.parts import weights_path
from engine.config import Config
from engine.core.errors import ConfigError
from engine.kernels.gemm.product import Product
from engine.kernels.layer.weights import AttentionWeights, LayerWeights, Norm
from engine.model.loading import find_device, load_config
from engine.model.rotary import RotaryTables


@dataclass(frozen=True)
class _MtpLayer:
    """See `drafters.heads.stack.ProgramLayer`."""

    of: MtpWeights
    tables: RotaryTables

    @property
    def qkv(self) -> Product:
        return self.of.layer.products[0]

    @property
    def hidden(self) -> int:
        return self.of.structure.hidden

    @property
    def heads(self) -> tuple[int, int, int]:
        [mixer] = self.of.structure.attending.values()
        return mixer.heads, mixer.kv_heads, mixer.head_dim

    @property
    def weights(self) -> LayerWeights:
        assert isinstance(self.of.layer.weights.mixer, AttentionWeights)
        return self.of.layer.weights

    def rotation(self, positions: int) -> Tensor:
        self.tables.reserve(positions)
        return self.tables.tables[0]


class MtpHead(PooledWeights):
    """Drafts over some tokens of the target's vocabulary."""

    method = "mtp"
    published_growth = Dynamic()
    dtype = torch.bfloat16

    def __init__(self, weights: MtpWeights, layers: int):
        """Make the head. layers: of the target."""
        self.device, self.weights = torch.device("cpu"), weights
        self.hidden_size, self.target_ids = weights.structure.hidden, weights.own.target_ids
        self.feature_layers = (layers,)
        self._embedding_norm, self._state_norm = _torch_norm(weights.embedding_norm), _torch_norm(weights.state_norm)

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> MtpHead:
        """Load the head in the directory of its own model."""
        return cls(read_mtp(path, path, target.vocab_size), target.layers)

    @classmethod
    def from_config(cls, config: Config) -> HeadDrafter:
        """Return the drafter that `config` describes. Raises ConfigError where there is no CPU to draft on."""
        if find_device(config.device).type != "cpu":
            raise ConfigError("method=mtp: a model's own head drafts on a CPU; set device=cpu, or take method=suffix")
        options, path = config.drafter, weights_path(config)
        layers = load_config(config.model).get_text_config().num_hidden_layers
        head = cls(read_mtp(config.model, path, options.vocabulary), layers)
        drafter = HeadDrafter(head, policy_of(options, head.published_growth), options.shared_noise)
        drafter.warm_up(head.hidden_size)
        return drafter

    def fuse(self, features: Tensor) -> Tensor:
        return features[:, 0]

    def entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        self.weights.own.enter(tokens.tolist())
        embedded = self._embedding_norm(self.weights.embed(tokens))
        return torch.cat([embedded, self._state_norm(features.to(self.dtype))], dim=1)

    def new_stack(self) -> Stack:
        weights = self.weights
        layer = _MtpLayer(weights, RotaryTables(weights.structure.rotary))
        return Stack(
            StackSpec(
                [layer], self.dtype, weights.head, self.entered, weights.norm, entry=weights.join, keeps=True,
                normed=True,
            )
        )  # fmt: skip

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> PooledSession:
        return PooledSession(self, scratch)


def _torch_norm(norm: Norm) -> RMSNorm:
    return RMSNorm(norm.weight.to(torch.bfloat16), norm.epsilon)
