"""A head in training: a plain module whose state dict is the public checkpoint layout.

All share one indexing. Row i of a sequence stands for the text up to token t[i + 1]: the target's feature f[i] and the
token after it. Draft step k of row i has seen the tokens up to t[i + 1 + k] and predicts t[i + 2 + k]. Some rows of
each text are *anchors*: drafts start from them, the others are only their context.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters.heads.checkpoint import Checkpoint
from drafters.training.loss import Factors


@dataclass(frozen=True)
class Texts:
    """The texts that a head drafts from. features: [batch, rows, states, hidden], true. tokens: [batch, rows + 1 +
    steps].

    embedded: [..., hidden], the tokens' embeddings (see `HeadModule.embed`). anchors: [batch, anchors], rows. known:
    [batch, anchors], how many of the tokens to draft are given to a block head.
    """

    features: Tensor
    tokens: Tensor
    embedded: Tensor
    anchors: Tensor
    known: Tensor

    def at_anchors(self, values: Tensor, offset: int = 0) -> Tensor:
        """Return [batch, anchors, ...], `offset` rows after each anchor. values: [batch, rows or more, ...]."""
        batch = torch.arange(len(values), device=values.device)[:, None]
        return values[batch, self.anchors + offset]

    def drafted(self, step: int) -> Tensor:
        """Return [batch, anchors, hidden]: the embedding of the token that draft step `step` starts from."""
        return self.at_anchors(self.embedded, 1 + step)


class HeadModule(nn.Module, ABC):
    """A head under training. draft_ids: [draft_vocab] the target's id of each output; None: all in order."""

    draft_ids: Tensor | None = None
    learns_prompts = False
    """Whether it learns from the prompts' tokens too; other heads learn only from the target's own words."""

    def embed(self, tokens: Tensor, target: Any) -> Tensor:
        """Return the embeddings, the target's, of tokens: [batch, n]."""
        embedded: Tensor = target.get_input_embeddings()(tokens)
        return embedded

    @abstractmethod
    def draft(self, texts: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each draft step, the prediction after every anchor, [batch, anchors, h], and the feature it leads
        to.

        Ends early where the head cannot draft that far.
        """

    @abstractmethod
    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        """Return the factors of the logits of draft step `step`. states: [n, h]; previous: [n], the token before."""

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor | None:
        """Return [n] logits of the share of the target's probability that the draft's covers; None if not predicted."""
        return None

    @abstractmethod
    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """Return file name, config and tensors of the public layout. The tensors are the module's own memory, except
        those that are computed.
        """

    @torch.no_grad()
    def begin_with(self, start: Checkpoint) -> None:
        """Take the weights of a head that `export` wrote; the draft vocabularies must be the same.

        Raises ModelError for a head that computes something else, which the recipe or the training does not know.
        """
        _, config, tensors = self.export()
        if start.speculator is not None or any(start.config.get(key) for key in _NOT_TRAINED):
            raise start.error("is not of a kind that `talon train` makes")
        for key, value in json.loads(json.dumps(config)).items():
            if key not in _ABOUT_THE_FILE and start.config.get(key, value) != value:
                raise start.error(f"config.json: {key}={start.config[key]!r}, where the recipe makes {value!r}")
        for name, own in tensors.items():
            if name not in _VOCABULARY_MAPS:
                own.copy_(start.take(name, *own.shape))
        start.finish()


_VOCABULARY_MAPS = ("d2t", "t2d")
_NOT_TRAINED = ("norm_before_residual", "eagle_aux_hidden_state_layer_ids")  # keys that heads of others may have
_ABOUT_THE_FILE = ("architectures", "dtype", "transformers_version")  # keys of config.json that change no number


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the public layout's maps from a draft vocabulary to the target's, d2t as differences of ids, and back."""
    ids = draft_ids.cpu()
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }


def llama_values(config: LlamaConfig) -> dict[str, Any]:
    """Return what a head's config.json says about its layer."""
    keys = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    )  # fmt: skip
    return {"model_type": "llama", "num_hidden_layers": 1, **{key: getattr(config, key) for key in keys}}
