"""Logits of the stock forward of a model: of a whole one in memory, or layer by layer of one whose weights are not.

In the second the stock code runs as it is. A forward whose layers pass on what they get shows what each layer is called
with. Then every layer runs with its own weights, read for it and dropped after it, on all texts that are asked for; and
a last forward, whose layers give what the last one made, ends as the stock forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from engine.core.errors import ModelError, first_line
from engine.kernels.attention.attention import Rule
from engine.kernels.quant.stored import StoredMatrix
from engine.model.reader.parts import text_part
from engine.model.stock import NAME, attending
from engine.model.structure import OtherStructure
from engine.model.trial.float32_products import stock_products
from engine.model.trial.windows import short_windows

_HEAD_ROWS = 1 << 14  # outputs of the last matrix that are in memory together


class Offsets(NamedTuple):
    """What is added to the positions of a text's tokens before `first`, and of the others."""

    before: int = 0
    after: int = 0


NEAR = Offsets()


class StockLogits(Protocol):
    """The forward that a trial compares with."""

    def __call__(
        self, tokens: list[int], offsets: Sequence[Offsets], first: int = 0, beyond: bool = False
    ) -> list[Tensor]:
        """Return [tokens - first, vocab] float32, the logits of the text's tokens from `first` on, for each of these
        offsets; then, if `beyond`, those without offsets and with short windows.
        """
        ...


class WholeStock:
    """The forward of a model that is in memory. Raises ModelError if it cannot run."""

    def __init__(self, model: Any, name: str):
        self.model, self.name = model, name

    def __call__(
        self, tokens: list[int], offsets: Sequence[Offsets], first: int = 0, beyond: bool = False
    ) -> list[Tensor]:
        found = [self._logits(tokens, one, first)[first:] for one in offsets]
        if beyond:
            with short_windows(self.model.config.get_text_config()):
                found.append(self._logits(tokens, NEAR, first)[first:])
        return found

    def _logits(self, tokens: list[int], offsets: Offsets, first: int) -> Tensor:
        device = self.model.device
        places = _places(len(tokens), offsets, first, device)
        try:
            ids = torch.tensor([tokens], device=device)
            logits: Tensor = self.model(ids, use_cache=False, **places).logits[0].float()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"model={self.name}: its own forward fails, of the {self.model.config.model_type} family in "
                f"transformers ({first_line(error)}); get the checkpoint again, or use another target"
            ) from error
        return logits


def passed_rules(model: Any) -> dict[int, Rule]:
    """Return the attention rules that the attention layers of a model in memory pass to our function."""
    rules: dict[int, Rule] = {}
    with _talons_attention(model), attending(_Observer(rules)):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    return rules


@contextmanager
def _talons_attention(model: Any) -> Iterator[None]:
    usual = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


def _places(rows: int, offsets: Offsets, first: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the options of a call for a text of so many rows. Without the mask, which hides nothing, transformers
    would take a gap between positions for the end of a text.
    """
    if not any(offsets):
        return {}
    positions = torch.arange(rows, device=device)
    positions[:first] += offsets.before
    positions[first:] += offsets.after
    return {"position_ids": positions[None], "attention_mask": torch.ones_like(positions)[None]}


class ReadsParameters(Protocol):
    """Where the weights come from."""

    def matrix(self, name: str) -> StoredMatrix: ...
    def values(self, name: str) -> Tensor: ...


class LayeredStock:
    """The forward of a model of the common structure whose matrices are on the meta device.

    passed: the attention rule of each layer; then, if those were asked for, the rules with short windows.
    """

    def __init__(self, model: Any, weights: ReadsParameters):
        self.model, self.weights = model, weights
        self.base, self.prefix = text_part(model)
        self.passed: list[dict[int, Rule]] = []
        self._several = False  # whether layers return a tuple

    def __call__(
        self, tokens: list[int], offsets: Sequence[Offsets], first: int = 0, beyond: bool = False
    ) -> list[Tensor]:
        with stock_products(), self._embeddings_of(tokens):
            readings = [self._reading(tokens, offsets, first)]
            if beyond:
                readings.append(self._reading(tokens, [NEAR], first, short=True))
            for index, layer in enumerate(self.base.layers):
                at = f"{self.prefix}layers.{index}."
                weights = {name: self.weights.values(f"{at}{name}") for name, _ in layer.named_parameters()}
                for reading in readings:
                    self._run_layer(layer, weights, index, reading)
            self.passed = [reading.rules for reading in readings]
            last = torch.cat([state for reading in readings for state in reading.states])
            ids = torch.arange(len(tokens)).expand(len(last), -1)
            with self._layers(lambda *_, **__: self._made(last)), self._head_in_slices(first):
                return [*self.model(ids, use_cache=False).logits.float()]

    def _reading(self, tokens: list[int], offsets: Sequence[Offsets], first: int, short: bool = False) -> _Reading:
        """Record the layers' calls for the text at these offsets; they are one batch, if the calls allow it."""
        with self._windows(short):
            calls = [self._calls(len(tokens), one, first) for one in offsets]
            with _talons_attention(self.model):
                marked = self._calls(1)
        with suppress(_Apart):
            calls = [[_Call(*map(_batch, zip(*of_layer, strict=True))) for of_layer in zip(*calls, strict=True)]]
        return _Reading(short, calls, marked, [call[0].args[0] for call in calls], {})

    def _run_layer(self, layer: nn.Module, weights: dict[str, Tensor], index: int, reading: _Reading) -> None:
        """Take the reading's states through a layer, and note its attention rule, for which one row is enough."""
        with self._windows(reading.short):
            with _talons_attention(self.model), attending(_Observer(reading.rules)):
                _run(layer, weights, reading.marked[index], reading.states[0][:1, :1])
            for number, call in enumerate(reading.calls):
                reading.states[number] = _run(layer, weights, call[index], reading.states[number])

    def _windows(self, short: bool) -> AbstractContextManager[object]:
        return short_windows(self.model.config.get_text_config()) if short else nullcontext()

    def _calls(self, rows: int, offsets: Offsets = NEAR, first: int = 0) -> list[_Call]:
        """Return the arguments of each layer's call for a text of so many rows."""
        calls: list[_Call] = []

        def pass_on(state: Tensor, *args: Any, **options: Any) -> Tensor | tuple[Tensor, None]:
            if state.dim() < 3:
                raise _TakesFirst
            calls.append(_Call((state, *args), options))
            return self._made(state)

        with self._layers(pass_on):
            try:
                decoder = getattr(self.model, self.prefix.partition(".")[0])
                made = decoder(torch.arange(rows)[None], use_cache=False, **_places(rows, offsets, first))
                if made.last_hidden_state.dim() == 3:
                    return calls
            except (_TakesFirst, ValueError):  # the second, if the model takes a state apart as two values
                pass
        if self._several:
            raise OtherStructure("layers that return neither a state nor a state and more")
        self._several = True
        return self._calls(rows, offsets, first)

    def _made(self, state: Tensor) -> Tensor | tuple[Tensor, None]:
        """Return the state in the form in which this family's layers return it: alone, or as the first of several
        values.
        """
        return (state, None) if self._several else state

    @contextmanager
    def _layers(self, forward: Callable[..., Tensor | tuple[Tensor, None]]) -> Iterator[None]:
        """Let all layers call `forward` in place of their own within this context."""
        for layer in self.base.layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.base.layers:
                del layer.forward

    @contextmanager
    def _embeddings_of(self, tokens: list[int]) -> Iterator[None]:
        """Reduce the vocabulary to the tokens of the text, in its order, within this context. Other matrices beside the
        layers are in memory too.
        """
        children = {name: one for name, one in self.base.named_children() if isinstance(one, nn.Embedding | nn.Linear)}
        kept = {name: (one.weight, getattr(one, "padding_idx", None)) for name, one in children.items()}
        for name, one in children.items():
            matrix = self.weights.matrix(f"{self.prefix}{name}.weight")
            looked_up = isinstance(one, nn.Embedding)
            found = matrix.rows(torch.tensor(tokens)) if looked_up else matrix.values()
            one.weight = nn.Parameter(found, requires_grad=False)
            if looked_up:
                one.padding_idx = None
        try:
            yield
        finally:
            for name, one in children.items():
                one.weight, padding = kept[name]
                if isinstance(one, nn.Embedding):
                    one.padding_idx = padding

    @contextmanager
    def _head_in_slices(self, first: int) -> Iterator[None]:
        """Multiply a text's rows from `first` on by the output matrix within this context, in slices, so that few of
        its rows are in memory at once.
        """
        head = self.model.lm_head
        matrix = self.weights.matrix("lm_head.weight")

        def multiply(state: Tensor) -> Tensor:
            state = state[:, first:]
            starts = range(0, len(head.weight), _HEAD_ROWS)
            parts = [F.linear(state, matrix.row_slice(at, at + _HEAD_ROWS).values()) for at in starts]
            logits = torch.cat(parts, dim=-1)
            return logits if head.bias is None else logits + head.bias

        head.forward = multiply
        try:
            yield
        finally:
            del head.forward


class _TakesFirst(Exception):
    """The model takes the first of what a layer returns, so it takes a tuple."""


class _Call(NamedTuple):
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Reading(NamedTuple):
    """Texts on their way through the layers. short: whether all windows are short. calls: for each batch, of each
    layer. marked: of one row, for the rules. states: of each batch, after the layers so far.
    """

    short: bool
    calls: list[list[_Call]]
    marked: list[_Call]
    states: list[Tensor]
    rules: dict[int, Rule]


class _Apart(Exception):
    """Texts that cannot be a batch."""


def _batch(values: Sequence[Any]) -> Any:
    """Return an argument for a batch of texts, given that of each one. Raises _Apart."""
    one = values[0]
    if any(type(value) is not type(one) for value in values):
        raise _Apart
    if isinstance(one, Tensor):
        if one.dim() < 2 or not all(len(value) == 1 and value.shape == one.shape for value in values):
            raise _Apart
        return torch.cat(values)
    if isinstance(one, tuple):
        return tuple(map(_batch, zip(*values, strict=True)))
    if isinstance(one, dict):
        return {name: _batch([value[name] for value in values]) for name in one}
    if any(value != one for value in values):
        raise _Apart
    return one


def _run(layer: nn.Module, weights: dict[str, Tensor], call: _Call, state: Tensor) -> Tensor:
    made: Tensor | tuple[Tensor] = functional_call(layer, weights, (state, *call.args[1:]), call.options)
    return made[0] if isinstance(made, tuple) else made


class _Observer:
    """Notes the rules that layers pass to attention, and attends to nothing."""

    def __init__(self, rules: dict[int, Rule]):
        self.rules = rules

    def attend(self, layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.rules[layer] = rule
        heads, rows = query.shape[1:3]
        return query.new_zeros(1, rows, heads, value.shape[-1])
