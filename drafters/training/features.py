"""The target's hidden states of the training text. A head is trained for several epochs and the heads of one target
share the text, while the target's forward costs more than most heads' own: so its hidden states are saved to disk when
they are first read.

One file per hidden state, [tokens, hidden] in bfloat16, and one of log-normalisers, float32: with these the target's
probabilities over a draft vocabulary need no product over the whole vocabulary.

An accelerator computes them faster than a disk reads them, and has much memory: it holds them there (HeldFeatures).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.training.answers import Example
from engine.core.errors import ConfigError

_FORWARD_TOKENS = {"cpu": 2048, "cuda": 32768}  # padding included, which bounds a forward's memory
_LOGITS = 1 << 27  # numbers at a time
_HELD_SHARE = 0.75  # of an accelerator's free memory; the rest is for training


def kept_states(layers: int) -> tuple[int, ...]:
    """The hidden states that the heads trained here read, all taken together. layers: the target's."""
    inner = {2, layers // 4 + 2, layers // 2, 3 * layers // 4 - 1, layers - 3}
    return (*sorted(state for state in inner if 0 < state < layers), layers)


class FeatureSource:
    """Features recomputed at every read, which takes no disk space."""

    def __init__(self, target: Any, examples: Sequence[Example]):
        self.target, self.examples = target, examples
        self.lengths = [len(example.tokens) for example in examples]

    def digest(self) -> str:
        """Tells the examples of different data apart."""
        return features_name("", self.examples)

    def read(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features of some examples, zero after each one's end.

        Returns hidden states [examples, longest, states, hidden] bfloat16, and log-normalisers [examples, longest]
        float32, which are set for an answer's tokens only.
        """
        computed: tuple[Tensor, Tensor] = self._compute(chosen, states)
        return computed

    @torch.no_grad()  # not inference_mode, whose tensors cannot be saved for backward
    def _compute(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One forward over some examples, padded on the right, which causal attention does not see."""
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
            normaliser[rows] = output(last[rows]).float().logsumexp(-1)
        return hidden, normaliser.view(len(chosen), width)


class HeldFeatures(FeatureSource):
    """The hidden states `states` of all examples in the accelerator's memory, computed at once.

    held: [tokens + 1, states, hidden] bfloat16, and `normalisers`: [tokens + 1]; the last row is the padding's, zero.
    """

    def __init__(
        self,
        target: Any,
        examples: Sequence[Example],
        states: Sequence[int],
        progress: Callable[[int], None] = lambda done: None,
    ):
        super().__init__(target, examples)
        self.states, self.starts = tuple(states), np.concatenate([[0], np.cumsum(self.lengths)])
        tokens, hidden = int(self.starts[-1]), target.config.get_text_config().hidden_size
        self.held = torch.zeros(tokens + 1, len(states), hidden, dtype=torch.bfloat16, device=target.device)
        self.normalisers = torch.zeros(tokens + 1, device=target.device)
        done = 0
        for group in _groups(self.lengths, range(len(examples)), _FORWARD_TOKENS[target.device.type]):
            values, normaliser = self._compute(group, self.states)
            rows = self._rows(group)
            real = (rows < tokens).to(target.device)
            places = rows.to(target.device)[real]
            self.held[places], self.normalisers[places] = values[real], normaliser[real]
            done += len(group)
            progress(done)

    @staticmethod
    def fits(target: Any, examples: Sequence[Example], states: Sequence[int]) -> bool:
        """Whether the target is on an accelerator that has the room."""
        if target.device.type != "cuda":
            return False
        tokens = sum(len(example.tokens) for example in examples)
        needed = tokens * len(states) * target.config.get_text_config().hidden_size * torch.bfloat16.itemsize
        return bool(needed < _HELD_SHARE * torch.cuda.mem_get_info(target.device)[0])

    def _rows(self, chosen: Sequence[int]) -> Tensor:
        """[examples, longest] int64: where each token's features lie, on the CPU."""
        lengths = torch.tensor([self.lengths[i] for i in chosen])[:, None]
        at = torch.arange(max(self.lengths[i] for i in chosen))
        rows = torch.from_numpy(self.starts[list(chosen)])[:, None] + at
        return rows.masked_fill(at >= lengths, int(self.starts[-1]))

    def read(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = sent(self._rows(chosen), self.held.device)
        held = self.held[rows]
        if tuple(states) != self.states:
            held = held[:, :, [self.states.index(state) for state in states]]
        return held, self.normalisers[rows]


class StoredFeatures(FeatureSource):
    """The hidden states `kept_states` of all examples in files of `folder`."""

    def __init__(self, folder: Path, target: Any, examples: Sequence[Example]):
        super().__init__(target, examples)
        config = target.config.get_text_config()
        self.states = kept_states(config.num_hidden_layers)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shape = (self.starts[-1], config.hidden_size)
            self.files = {state: _map(folder / f"state-{state}", np.uint16, *shape) for state in self.states}
            self.normalisers = _map(folder / "normaliser", np.float32, self.starts[-1])
            self.known = _map(folder / "known", np.bool_, len(examples))
        except OSError as error:
            raise ConfigError(
                f"features={folder}: cannot be written ({error.strerror}): make room, or set store_features: false"
            ) from None

    def _write(self, group: Sequence[int], hidden: Tensor, normaliser: Tensor) -> None:
        bits, values = hidden.cpu().view(torch.uint16).numpy(), normaliser.cpu().numpy()
        for row, i in enumerate(group):
            place = slice(self.starts[i], self.starts[i + 1])
            for column, state in enumerate(self.states):
                self.files[state][place] = bits[row, : self.lengths[i], column]
            self.normalisers[place] = values[row, : self.lengths[i]]
            self.known[i] = True

    def read(self, chosen: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
        at_once = _FORWARD_TOKENS[self.target.device.type]
        for group in _groups(self.lengths, [i for i in chosen if not self.known[i]], at_once):
            self._write(group, *self._compute(group, self.states))
        width = max(self.lengths[i] for i in chosen)
        bits = np.zeros((len(chosen), width, len(states), self.files[self.states[0]].shape[1]), np.uint16)
        normaliser = np.zeros((len(chosen), width), np.float32)
        for row, i in enumerate(chosen):
            place = slice(self.starts[i], self.starts[i + 1])
            for column, state in enumerate(states):
                bits[row, : self.lengths[i], column] = self.files[state][place]
            normaliser[row, : self.lengths[i]] = self.normalisers[place]
        device = self.target.device
        return torch.from_numpy(bits).view(torch.bfloat16).to(device), torch.from_numpy(normaliser).to(device)


def features_name(target: str, examples: Sequence[Example]) -> str:
    """A folder name that changes with what the features depend on. target: `target_digest`."""
    digest = hashlib.blake2b(target.encode(), digest_size=8)
    for example in examples:
        digest.update(np.asarray([example.answer, *example.tokens], np.int64).tobytes())
    return f"features-{digest.hexdigest()}"


def _map(path: Path, dtype: Any, *shape: int) -> Any:
    """A file as an array; zeros take no disk space until they are written."""
    with path.open("ab") as file:
        file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=shape)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without waiting for what an accelerator still has to do."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _groups(lengths: Sequence[int], chosen: Sequence[int], at_once: int) -> list[list[int]]:
    """Examples of similar lengths, as many as one forward of `at_once` tokens takes."""
    groups: list[list[int]] = []
    for i in sorted(chosen, key=lambda i: lengths[i]):
        if not groups or lengths[i] * (len(groups[-1]) + 1) > at_once:
            groups.append([])
        groups[-1].append(i)
    return groups
