"""The forwards of a target: what they share, and how they differ.

| forward | where | which models | a row's bits depend on |
| --- | --- | --- | --- |
| lean (`decoder.py`) | CPU | decoders of a known structure, read from their modules | the keys that it sees |
| stock (`stock.py`) | CPU | those of `transformers` that take our attention | the same, if all products are linear |
| cuda (`cuda/cuda_forward.py`) | CUDA | the same | the same, in forwards of the sizes that agreed at load |
| masked (`masked.py`) | anywhere | those that take a 4-D mask | the other rows |

A model gets the first that a trial at load finds right (`engine.model.trial.forward_choice`): its logits are those of
the model as `transformers` loaded it. What "exact" promises, that a row has the same bits in any batch, is measured
then too.

The first three run a `Batch` of many requests, whose keys and values lie in one `KVPool`. The last has caches of its
own, those of `transformers`, and takes the requests' segments one after the other, so it is called with them; it makes
its caches itself (`new_cache`, `release`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.core.batch import Batch


class Forward(Protocol):
    """A forward over a pool. sizes: numbers of rows that it computes: a batch is padded to the next of these, and a
    larger one runs in slices of the last; (1,) if it computes any number.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Run all rows, and write their keys and values to their slots of the pool.

        The caller has reserved the slots (`KVCache.reserve`) and commits those of rows that are to stay; the others are
        overwritten later. Returns the logits of the batch's chosen rows, [chosen, vocab] in the model's type, in
        tensors that no later forward writes to, and, if layers are given, [rows, layers, hidden]: the input of each,
        where the number past the last layer means the output after the last norm, and further numbers, which the lean
        decoder alone knows, parts of keys and values (`DecoderStructure.last_keys`). IndexError for a token that the
        model has no embedding of.
        """
        ...


@runtime_checkable
class Captures(Protocol):
    """A forward whose work is captured as CUDA graphs."""

    def capture(self, feature_layers: Sequence[int], context: int) -> None:
        """Capture the graphs that most requests need. context: positions served."""
