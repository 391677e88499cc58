"""SPS: a smaller causal LM of the same vocabulary drafts (speculative sampling, Leviathan et al. 2023).

It is a head that reads the text itself instead of the target's hidden states, so it grows any tree that a head can: the
published chain, a fixed tree of `branches`, or an adaptive one. Matrices in blocks multiply rows rounded to 8 bits:
drafts may differ, and no text does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoTokenizer

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Policy, Static, policy_of
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.session import Session
from drafters.parts import weights_path
from engine.config import Config
from engine.core.errors import DrafterMismatch, ModelError
from engine.core.tree import TokenTree
from engine.model.loading import load_config
from engine.model.target import Target

_ALIKE = 0.99  # share of the larger vocabulary's tokens that the smaller one has: the rest is padding
_CHUNK = 512  # prompt tokens of one forward


class SmallModel(Head):
    """A draft model as a head; its outputs are the target's own tokens."""

    method: ClassVar[str] = "sps"
    published_growth: Policy = Static([(0,) * depth for depth in range(1, 6)])

    def __init__(self, model: Target, vocabulary: int | None = None):
        """Make the model a head. vocabulary: the target's size, if it is smaller than the model's."""
        self.model = model
        self.feature_layers, self.device = (), model.device
        self.target_ids = torch.arange(min(model.vocab_size, vocabulary or model.vocab_size), device=model.device)

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "auto") -> SmallModel:
        return cls(Target.load(path, device=device, activations="int8", draft=True))

    @classmethod
    def from_config(cls, config: Config) -> HeadDrafter:
        path, options = weights_path(config), config.drafter
        with _told_of(path):
            vocabulary = common_vocabulary(path, config.model)
            head = cls(Target.load(path, config.dtype, config.device, activations="int8", draft=True), vocabulary)
        widths = options.branches or (1,) * (options.length or 5)
        as_published = options.branches or options.length or not config.verifier.cut
        policy = policy_of(
            options, level_by_level(widths, options.budget), default="published" if as_published else "adaptive"
        )
        drafter = HeadDrafter(head, policy, options.shared_noise)
        drafter.warm_up(0)
        return drafter

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> SmallSession:
        return SmallSession(self.model, len(self.target_ids), prompt, capacity, scratch)


class SmallSession(Session):
    """One request's state in a draft model. The cache holds the text up to and including its last token, node 0;
    drafted nodes follow. Only the first `vocabulary` token ids may be drafted.
    """

    def __init__(self, model: Target, vocabulary: int, prompt: Sequence[int], capacity: int, scratch: int):
        self.model, self.vocabulary, self.scratch = model, vocabulary, scratch
        self.cache = model.new_cache(capacity + scratch)
        self.unread = self._known(prompt)
        self.tokens, self.parents = self.unread[-1:], [-1]
        self.synced = len(prompt) - 1
        self._root_logits: Tensor | None = None

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        self.unread += self._known(tokens)
        self.synced = start + len(tokens)
        self.clear()
        self.tokens[0], self._root_logits = self.unread[-1], None

    def count_unread(self) -> int:
        return len(self.unread)

    def root(self) -> Tensor:
        if self._root_logits is None:
            self.cache.length += self.cache.pending  # the previous node 0 is text now
            self.cache.pending = 0
            for at in range(0, len(self.unread), _CHUNK):
                logits, _ = self.model.prefill(self.cache, self.unread[at : at + _CHUNK])
            self.unread, self._root_logits = [], logits[None, : self.vocabulary]
            self.cache.length -= 1
            self.cache.pending = 1
        return self._root_logits

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor]:
        first = len(self.tokens)
        self.tokens += self._known(tokens)
        self.parents += parents
        tree = TokenTree.from_lists(self.tokens, self.parents, [1.0] * len(self.tokens))
        logits, _ = self.model.verify(self.cache, tree, first=first)
        self.cache.pending = 1
        return list(range(first, len(self.tokens))), logits[:, : self.vocabulary]

    def room(self) -> int:
        return min(self.scratch - (len(self.tokens) - 1), self.model.context - self.synced - 1)

    def clear(self) -> None:
        del self.tokens[1:], self.parents[1:]

    def close(self) -> None:
        self.model.release(self.cache)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens; the last one stands for those that only the target's padded vocabulary
        holds, and no text.
        """
        last = self.model.vocab_size - 1
        return [min(token, last) for token in tokens]


def level_by_level(widths: Sequence[int], budget: int) -> Static:
    """Return the tree in which every node of level i has widths[i] children, cut at `budget` nodes, root included."""
    paths = (path for depth in range(1, len(widths) + 1) for path in product(*map(range, widths[:depth])))
    return Static(list(islice(paths, budget - 1)))  # there may be more paths than fit in memory


@contextmanager
def _told_of(path: str) -> Iterator[None]:
    """Let errors of the draft model name drafter.path instead of the target's key."""
    try:
        yield
    except ModelError as error:
        raise type(error)(str(error).replace(f"model={path}:", f"drafter.path={path}:", 1)) from error


def common_vocabulary(path: str, model: str) -> int:
    """Return how many tokens the draft model shares with the target: the smaller of both vocabularies. Models of one
    family may pad its end to different sizes, and name what they pad with. Raises DrafterMismatch unless all else is
    equal.
    """
    ours, theirs = (load_config(p).get_text_config().vocab_size for p in (path, model))
    differ = f"drafter vocabulary {ours} != target vocabulary {theirs}"
    if all((Path(p) / "tokenizer.json").is_file() for p in (path, model)):
        mine, other = (_named(p) for p in (path, model))
        both = mine.keys() & other.keys()
        wrong = min((token_id for token_id in both if mine[token_id] != other[token_id]), default=None)
        if wrong is not None or len(both) < _ALIKE * max(len(mine), len(other)):
            at = "" if wrong is None else f" from token {wrong} on"
            raise DrafterMismatch(
                f"drafter tokenizer != target tokenizer{at} (drafter.path={path}): use a small model of the target's "
                "family"
            )
    elif ours > theirs:
        raise DrafterMismatch(f"{differ} (drafter.path={path}): use a small model of the target's family")
    common: int = min(ours, theirs)
    return common


def _named(path: str) -> dict[int, str]:
    """Return the tokens of a tokenizer, by id."""
    return {token_id: token for token, token_id in AutoTokenizer.from_pretrained(path).get_vocab().items()}
