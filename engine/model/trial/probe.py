"""Tries a model with a short text when it is loaded, at the first positions and at far ones.

Logits are compared with those of the model as it was loaded, and a token's bits alone with those in a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.tree import TokenTree
from engine.model.loading import name_of
from engine.model.reader.ternary import is_ternary
from engine.model.runner import Runner
from engine.model.trial.stock_logits import NEAR, Offsets, StockLogits
from engine.model.trial.windows import has_windows

_TOKENS = 24
_ACCEPTED = 3  # nodes of the tree that are committed
_FAR_ERROR = 5.0  # a far text's error may be so many times the near text's
_TOLERANCE, _TOLERANCE_OF_8_BITS = 0.1, 0.3
_APART = 1 / 3  # of what a gap changes, the error may be so much
_ROUTED = 1.5  # with experts, the error may be so many times what the stock forward differs from itself
_LIMITS = ("original_max_position_embeddings", "sliding_window", "attention_chunk_size")


class ModelProbe:
    """Tries whether a forward agrees with that of transformers, and a token's bits alone with those in a batch.

    expected: [tokens from `split` on, vocab] float32, the logits of the stock forward; beyond: those with short
    windows, None if the model names no windows; far, apart: the logits where the text begins at a later position, and
    where only what is read as a tree stands there, by that position.

    rounds: whether the model itself rounds rows to 8 bits. routes: whether it has experts. split: the tokens
    before it are read as text, the rest as a tree.

    stock: the forward of the model as it was loaded. context: the positions that will be served.
    """

    def __init__(self, model: Any, name: str, context: int, stock: StockLogits):
        self.config = model.config.get_text_config()
        self.rounds = any(is_ternary(module) for module in model.modules())
        self.routes = any(hasattr(module, "experts") for module in model.modules())
        self.split = _TOKENS // 2
        self.tokens = [(7 + 31 * i) % self.config.vocab_size for i in range(_TOKENS)]
        far, windowed = far_positions(self.config, context), has_windows(self.config)
        places = [Offsets(at if at != context // 2 or at == far[-1] else 0, at) for at in far]
        self.expected, *logits = stock(self.tokens, [Offsets(), *places], self.split, windowed)
        self.beyond = logits.pop() if windowed else None
        self.far = {at: found for at, found in zip(places, logits, strict=True) if at.before}
        self.apart = {at: found for at, found in zip(places, logits, strict=True) if not at.before}
        if self.expected.isnan().any():
            raise ModelError(
                f"model={name}: the logits of a short text are not numbers (NaN) in {name_of(model.dtype)}: "
                "the model overflows, or its weights are damaged; use dtype: float32 or get the checkpoint again"
            )
        if self.expected.std() == 0:
            raise ModelError(
                f"model={name}: the logits of a short text are all the same: weights that decide them are zeros; get "
                "the checkpoint again"
            )

    @property
    def heeds_windows(self) -> bool:
        """Whether the model attends by the windows that its configuration names, if any."""
        return self.beyond is None or not torch.equal(self.beyond, self.expected)

    def agrees(self, target: Runner, expected: Tensor) -> bool:
        """Return whether the text gives the expected logits when its second half is read as a tree with wrong
        siblings.
        """
        return self._error(target, expected) <= self._tolerance(target)

    def agrees_anywhere(self, target: Runner) -> bool:
        """Return whether the text gives the logits of the first positions, of all far ones, and of a gap. A far text
        may err little more than the near one does: in bfloat16 a scale by position can be smaller than what rounding is
        allowed. The near one is read last, so that it shows a forward that far positions change.
        """
        far = max((self._error(target, expected, at) for at, expected in self.far.items()), default=0.0)
        apart = [(self._error(target, found, at), self._allowed(target, found)) for at, found in self.apart.items()]
        near, tolerance = self._error(target, self.expected), self._tolerance(target)
        limit = min(tolerance, max(1e-3, _FAR_ERROR * near))
        return near <= tolerance and far <= limit and all(error <= max(limit, allowed) for error, allowed in apart)

    def _allowed(self, target: Runner, apart: Tensor) -> float:
        """Return what rounding may change where a gap gives these logits. A rotation that is a little wrong is far
        wrong between tokens that are far apart, and errs about as much as a gap changes. Some models' scores there are
        differences of large numbers, of which rounding to 16 bits changes something, and rounding to 8 more than can be
        told from a fault.
        """
        if target.dtype == torch.float32:
            return 0.0
        return torch.inf if self._has_8_bits(target) else _APART * self._difference(apart, self.expected)

    def _error(self, target: Runner, expected: Tensor, at: Offsets = NEAR) -> float:
        """Return the text's error in standard deviations of the expected logits, when it stands there.

        A model with experts has the error of its median row: where two experts' scores are nearly equal, rounding alone
        decides between them, and that row's logits differ from the stock forward's by far more than rounding does.
        """
        cache = target.new_cache(_TOKENS * 3)
        try:
            target.run([replace(Segment.of_text(self.tokens[: self.split], cache), offset=at.before)])
            cache.commit(range(self.split))
            tree, spine = self._with_siblings()
            logits, _ = target.run([replace(Segment.of_tree(tree, cache), offset=at.after)])
        finally:
            target.release(cache)
        return self._difference(logits[spine].float(), expected)

    def _difference(self, found: Tensor, expected: Tensor) -> float:
        """Return how far logits [rows, vocab] are apart, as `_error` says."""
        squares = (found - expected).pow(2).mean(1)
        error = (squares.median() if self.routes else squares.mean()).sqrt() / expected.std()
        return float(error.nan_to_num(torch.inf))

    def _tolerance(self, target: Runner) -> float:
        if self._has_8_bits(target):
            return _TOLERANCE_OF_8_BITS
        if target.dtype == torch.float32:
            return 1e-3
        by_routing = _ROUTED * self._own_difference() if self.routes else 0.0
        return max(_TOLERANCE, min(_TOLERANCE_OF_8_BITS, by_routing))

    def _has_8_bits(self, target: Runner) -> bool:
        return self.rounds or target.activations == "int8" or target.kv_type == "q8_0"

    def _own_difference(self) -> float:
        """Return how far the stock forward's logits of the text are from its own where the text begins elsewhere. If
        positions matter only by their distance, the two are rounded in other ways and choose other experts, no more.
        """
        return max((self._difference(far, self.expected) for far in self.far.values()), default=0.0)

    def equal_bits(self, target: Runner) -> bool:
        """Return whether a token's logits are the same bits read with others, alone, in a tree with wrong siblings, and
        after a part of that tree was committed, which layers with a state replay.
        """
        tokens = self.tokens
        read = target.new_cache(_TOKENS)
        whole, _ = target.run([Segment.of_text(tokens, read, wanted="all")])
        target.release(read)
        alone = target.new_cache(_TOKENS)
        equal = True
        for i, token in enumerate(tokens):
            logits, _ = target.run([Segment.of_text([token], alone)])
            alone.commit([0])
            equal &= torch.equal(logits[0], whole[i])
        target.release(alone)
        tree, spine = self._with_siblings()
        drafted = target.new_cache(_TOKENS * 3)
        target.prefill(drafted, tokens[: self.split])
        logits, _ = target.run([Segment.of_tree(tree, drafted)])
        equal &= torch.equal(logits[spine], whole[self.split :])
        target.commit([(drafted, spine[:_ACCEPTED])])
        logits, _ = target.run([Segment.of_text(tokens[self.split + _ACCEPTED :], drafted, wanted="all")])
        target.release(drafted)
        equal &= torch.equal(logits, whole[self.split + _ACCEPTED :])
        return bool(equal)

    def _with_siblings(self) -> tuple[TokenTree, list[int]]:
        """Return the text after its first part as a tree with two wrong siblings beside each node, and the right
        nodes.
        """
        nodes: list[int] = []
        parents: list[int] = []
        spine: list[int] = []
        for token in self.tokens[self.split :]:
            parent = spine[-1] if spine else -1
            spine.append(len(nodes))
            wrong = [(token + 1 + i) % self.config.vocab_size for i in range(2)]
            nodes += [token, *wrong] if parent >= 0 else [token]
            parents += [parent, parent, parent] if parent >= 0 else [parent]
        return TokenTree.from_lists(nodes, parents, [1.0] * len(nodes)), spine


def far_positions(config: Any, context: int) -> list[int]:
    """Return where far texts begin: past each limit that the configuration names, past half of the context, and at its
    end.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    named = [config.to_dict(), rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    limits = {values[key] for values in named for key in _LIMITS if isinstance(values.get(key), int)}
    last = context - _TOKENS
    return sorted(start for start in limits | {context // 2, last} if 0 < start <= last)
