"""The target's hidden states of the training text. A head is trained for several epochs and the heads of one target
share the text, while the target's forward costs more than most heads' own: so its hidden states are saved to disk when
they are first read.

One file per hidden state, [tokens, hidden] in bfloat16, and one of log-normalisers, float32: with these the target's
probabilities over a draft vocabulary need no product over the whole vocabulary.

An accelerator computes them faster than a disk reads them, and has much memory: there they are kept in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.training import cpu_loss
from drafters.training.answers import Example
from engine.core.errors import ConfigError

_FORWARD_TOKENS = {"cpu": 2048, "cuda": 32768}  # padding included, which bounds a forward's memory
_LOGITS = 1 << 27  # numbers that are computed at a time
_KEPT_SHARE = 0.75  # of an accelerator's free memory; the rest is for training


def kept_states(layers: int) -> tuple[int, ...]:
    """Return the hidden states that the heads trained here read, all taken together. layers: the target's."""
    inner = {2, layers // 4 + 2, layers // 2, 3 * layers // 4 - 1, layers - 3}
    return (*sorted(state for state in inner if 0 < state < layers), layers)


class FeatureSource:
    """Features recomputed at every read, which takes no disk space."""

    def __init__(self, target: Any, examples: Sequence[Example]):
        self.target, self.examples = target, examples
        self.lengths = [len(example.tokens) for example in examples]

    def digest(self) -> str:
        """Return a digest that tells the examples of different data apart."""
        return features_name("", self.examples)

    def read(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the features of some examples, zero after each one's end.

        These are hidden states [examples, longest, states, hidden] bfloat16, and log-normalisers [examples, longest]
        float32, which are set for an answer's tokens only.
        """
        computed: tuple[Tensor, Tensor] = self._compute(chosen, states)
        return computed

    @torch.no_grad()  # inference_mode would give tensors that cannot be saved for backward
    def _compute(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one forward over some examples, padded on the right, which causal attention does not see."""
        width = max(self.lengths[i] for i in chosen)
        device, output = self.target.device, self.target.get_output_embeddings()
        tokens = torch.tensor([self.examples[i].tokens + [0] * (width - self.lengths[i]) for i in chosen])
        out = self.target.base_model(tokens.to(device), output_hidden_states=True, use_cache=False)
        hidden = torch.stack([out.hidden_states[state] for state in states], dim=2).to(torch.bfloat16)
        at = torch.arange(width)
        ends = torch.tensor([self.lengths[i] for i in chosen])[:, None]
        hidden.masked_fill_((at >= ends).to(device)[:, :, None, None], 0)
        firsts = torch.tensor([self.examples[i].answer - 1 for i in chosen])[:, None]
        answered = ((at >= firsts) & (at < ends)).flatten().nonzero().flatten().to(device)
        last, normaliser = out.hidden_states[-1].flatten(0, 1), torch.zeros(len(chosen) * width, device=device)
        for rows in answered.split(max(1, _LOGITS // output.weight.shape[0])):
            normaliser[rows] = _log_sums(output(last[rows]))
        return hidden, normaliser.view(len(chosen), width)


class KeptFeatures(FeatureSource):
    """The hidden states `states` of all examples, kept: in the device's memory, where all are computed at once, or in
    files of `folder`, when they are first read.

    hidden: of each state [tokens, hidden] bfloat16, example after example; normalisers: [tokens] float32; known:
    [examples] bool.
    """

    def __init__(self, target: Any, examples: Sequence[Example], states: Sequence[int], folder: Path | None = None):
        super().__init__(target, examples)
        self.states, self.folder = tuple(states), folder
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        tokens, hidden = int(self.starts[-1]), target.config.get_text_config().hidden_size
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self.hidden = {state: self._kept(f"state-{state}", torch.bfloat16, tokens, hidden) for state in states}
            self.normalisers = self._kept("normaliser", torch.float32, tokens)
            self.known = self._kept("known", torch.bool, len(examples)).cpu().numpy()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"features={folder}: cannot be written ({error}): make room, or set store_features: false"
            ) from None
        if folder is None:
            self._learn(range(len(examples)))

    def _kept(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return zeros in memory, or a file as a tensor; its zeros take no disk space until they are written."""
        if self.folder is None:
            return torch.zeros(*shape, dtype=dtype, device=self.target.device)
        size = math.prod(shape)
        return torch.from_file(str(self.folder / name), shared=True, size=size, dtype=dtype).view(*shape)

    def _learn(self, chosen: Sequence[int]) -> None:
        """Compute the features of those examples that are not known yet."""
        at_once = _FORWARD_TOKENS[self.target.device.type]
        for group in _groups(self.lengths, [i for i in chosen if not self.known[i]], at_once):
            values, normaliser = self._compute(group, self.states)
            rows, real = self._rows(group)
            places = sent(rows[real], self.normalisers.device)
            for column, state in enumerate(self.states):
                self.hidden[state][places] = values[:, :, column][real.to(values.device)]
            self.normalisers[places] = normaliser[real.to(normaliser.device)]
            self.known[group] = True

    def read(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._learn(chosen)
        rows, real = self._rows(chosen)
        rows, real = sent(rows, self.normalisers.device), sent(real, self.normalisers.device)
        hidden = torch.stack([self.hidden[state][rows] for state in states], dim=2)
        return hidden.mul_(real[:, :, None, None]), self.normalisers[rows].mul_(real)

    def _rows(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return [examples, longest] int64: where each token's features lie, and which of them are no padding."""
        lengths = torch.tensor([self.lengths[i] for i in chosen])[:, None]
        at = torch.arange(max(self.lengths[i] for i in chosen))
        real = at < lengths
        return (torch.from_numpy(self.starts[list(chosen)])[:, None] + at).where(real, 0), real


def room_for(target: Any, examples: Sequence[Example], states: Sequence[int]) -> bool:
    """Return whether the target is on an accelerator that has the memory to keep these states."""
    if target.device.type != "cuda":
        return False
    tokens = sum(len(example.tokens) for example in examples)
    needed = tokens * len(states) * target.config.get_text_config().hidden_size * torch.bfloat16.itemsize
    return bool(needed < _KEPT_SHARE * torch.cuda.mem_get_info(target.device)[0])


def features_name(target: str, examples: Sequence[Example]) -> str:
    """Return a folder name that changes with what the features depend on. target: `target_digest`."""
    digest = hashlib.blake2b(target.encode(), digest_size=8)
    for example in examples:
        digest.update(np.asarray([example.answer, *example.tokens], np.int64).tobytes())
    return f"features-{digest.hexdigest()}"


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on the device, without waiting for what an accelerator still has to do."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _log_sums(logits: Tensor) -> Tensor:
    """Return log(sum(exp(row))) of each row, [rows] float32."""
    if logits.device.type == "cpu" and cpu_loss.fits(logits.dtype, logits.shape[1]):
        return cpu_loss.log_sums(logits.contiguous())
    return logits.float().logsumexp(-1)


def _groups(lengths: Sequence[int], chosen: Sequence[int], at_once: int) -> list[list[int]]:
    """Group examples of similar lengths, as many as one forward of `at_once` tokens takes."""
    groups: list[list[int]] = []
    for i in sorted(chosen, key=lambda i: lengths[i]):
        if not groups or lengths[i] * (len(groups[-1]) + 1) > at_once:
            groups.append([])
        groups[-1].append(i)
    return groups
