"""SPS: a smaller causal LM of the same vocabulary drafts (speculative sampling, Leviathan et al. 2023).

It is a head that reads the text itself instead of the target's hidden states, so it grows any tree that a head can:
the published chain, a fixed tree of `branches`, or an adaptive one. Matrices in blocks multiply rows rounded to 8 bits:
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
from drafters.heads.growth.policies import Policy, Static
from drafters.heads.growth.policy_choice import policy_of
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.session import Session
from drafters.parts import weights_path
from engine.config import Config
from engine.core.errors import DrafterMismatch, ModelError
from engine.core.tree import TokenTree
from engine.model.loading import load_config
from engine.model.target import Target

_CHUNK = 512  # prompt tokens of one forward


class SmallModel(Head):
    """A draft model as a head; its outputs are the target's own tokens."""

    method: ClassVar[str] = "sps"
    published_growth: Policy = Static([(0,) * depth for depth in range(1, 6)])

    def __init__(self, model: Target):
        self.model = model
        self.feature_layers, self.device = (), model.device
        self.target_ids = torch.arange(model.vocab_size, device=model.device)

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "auto") -> SmallModel:
        return cls(Target.load(path, device=device, activations="int8"))

    @classmethod
    def from_config(cls, config: Config) -> HeadDrafter:
        path, options = weights_path(config), config.drafter
        with _told_of(path):
            check_same_vocabulary(path, config.model)
            head = cls(Target.load(path, config.dtype, config.device, activations="int8"))
        widths = options.branches or (1,) * (options.length or 5)
        policy = policy_of(options, level_by_level(widths, options.budget), default="published")
        return HeadDrafter(head, policy, options.shared_noise)

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> SmallSession:
        return SmallSession(self.model, prompt, capacity, scratch)


class SmallSession(Session):
    """One request of a `SmallModel`. The cache holds the text up to node 0, whose entry is its last; nodes follow."""

    def __init__(self, model: Target, prompt: Sequence[int], capacity: int, scratch: int):
        self.model, self.scratch = model, scratch
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

    def behind(self) -> int:
        return len(self.unread)

    def root(self) -> Tensor:
        if self._root_logits is None:
            self.cache.length += self.cache.pending  # the previous node 0 is text now
            self.cache.pending = 0
            for at in range(0, len(self.unread), _CHUNK):
                logits, _ = self.model.prefill(self.cache, self.unread[at : at + _CHUNK])
            self.unread, self._root_logits = [], logits[None]
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
        return list(range(first, len(self.tokens))), logits

    def room(self) -> int:
        return min(self.scratch - (len(self.tokens) - 1), self.model.context - self.synced - 1)

    def clear(self) -> None:
        del self.tokens[1:], self.parents[1:]

    def close(self) -> None:
        self.model.release(self.cache)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens; for those that only the target's padded vocabulary holds, and no text, the last one."""
        last = self.model.vocab_size - 1
        return [min(token, last) for token in tokens]


def level_by_level(widths: Sequence[int], budget: int) -> Static:
    """The tree in which every node of level i has widths[i] children, cut at `budget` nodes, root included."""
    paths = (path for depth in range(1, len(widths) + 1) for path in product(*map(range, widths[:depth])))
    return Static(list(islice(paths, budget - 1)))  # there may be more paths than fit in memory


@contextmanager
def _told_of(path: str) -> Iterator[None]:
    """Errors of the draft model name drafter.path instead of the target's key."""
    try:
        yield
    except ModelError as error:
        raise type(error)(str(error).replace(f"model={path}:", f"drafter.path={path}:", 1)) from error


def check_same_vocabulary(path: str, model: str) -> None:
    """Raise DrafterMismatch unless the two models share one vocabulary. Models of one family may pad its end to
    different sizes: the small one's may be shorter.
    """
    ours, theirs = (load_config(p).get_text_config().vocab_size for p in (path, model))
    if ours > theirs:
        raise DrafterMismatch(
            f"drafter vocabulary {ours} != target vocabulary {theirs} (drafter.path={path}): "
            "use a small model of the target's family"
        )
    if all((Path(p) / "tokenizer.json").is_file() for p in (path, model)):
        mine, other = (AutoTokenizer.from_pretrained(p).get_vocab() for p in (path, model))
        if mine != other:
            raise DrafterMismatch(
                f"drafter tokenizer != target tokenizer (drafter.path={path}): same size, other tokens; "
                "use a small model of the target's family"
            )
