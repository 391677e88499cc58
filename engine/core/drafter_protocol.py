"""The drafter interface. A drafter proposes and never decides: a wrong draft costs speed, never changes text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.outcomes import DraftQuery, Following
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor  # which drafters without a model do not import


@dataclass(frozen=True)
class Verdict:
    """What the target said of one round.

    tree: the tree it verified. path: the accepted nodes, root first. tokens: what the round emitted, the path's
    tokens below the root and the bonus token; of a model that rested, all that was emitted meanwhile.
    features: [positions, layers, hidden] uint16 (`bfloat16_bits`), or bfloat16 on the target's device: the target's
    hidden states of `Drafter.feature_layers` at the path's nodes (the whole prompt, for the verdict of the prefill), or
    None.
    successors: [nodes, Drafter.successors] int32, the target's likeliest tokens after each node of the tree, best
    first, or None. rest: whether a draft model should rest. token_s: the time that one more token is currently
    worth. row_tokens: what verifying one more node costs, in tokens, None if that is unknown.
    """

    tree: TokenTree
    path: list[int]
    tokens: list[int]
    features: NDArray[np.uint16] | Tensor | None = None
    successors: NDArray[np.int32] | None = None
    rest: bool = False
    token_s: float = 0.01
    row_tokens: float | None = None


@dataclass(frozen=True)
class DeviceVerdicts:
    """What a round came to, as it will be known on a GPU. places: of the round's trees that are drawn from there, by
    their index, which one is theirs of those below.

    lengths: [trees] int32, how many nodes of each are accepted, its root included. tokens: [trees, most] int64, what is
    drawn at each of these nodes. features: [trees, most, layers, hidden], their hidden states, bfloat16. What is past a
    tree's length is zeros.
    """

    places: Mapping[int, int]
    lengths: Tensor
    tokens: Tensor
    features: Tensor


class OnItsWay(Protocol):
    """What a GPU sends to the host once it has done what was launched; see `engine.device.Download`."""

    def read(self) -> Any: ...
    def seconds_after(self, other: Any) -> float: ...


BetweenSteps = Callable[[Callable[[], dict[int, TokenTree]]], None]
"""Called with a function that returns the trees so far, by index into `queries`; may raise to abandon the work."""


class Drafter(ABC):
    """Proposes token trees for the requests that were started.

    One instance serves all requests of a worker in turn, from one thread. `propose` may be called for outcomes that
    have not happened (and may never): it must not change what later calls return, except through caches.
    """

    feature_layers: tuple[int, ...] = ()
    """Hidden states wanted from the target: 0 is the embedding, i the output of layer i (as `output_hidden_states`).
    Numbers past the last layer's are parts of its keys and values (`engine.model.structure.pieces_of`).
    """

    successors: int = 0
    """How many of the target's likeliest tokens after each verified node the verdicts must carry."""

    calibrated: bool = False
    """Whether c(v) matches observed acceptance, so that the verifier may cut trees by their cost."""

    rests: bool = False
    """Whether it has a draft model that rests when told to; it then drafts without the model, possibly nothing."""

    draft_s: float = 0.0
    """Seconds of a usual draft of its model, as measured when it was loaded; 0: unknown."""

    read_s: float = 0.0
    """Seconds that its model takes to read a position of the text, likewise."""

    together: int = 4
    """How many outcomes, over all requests, to draft in the same forwards: more outcomes take longer."""

    source: int = 0
    """The bit that marks its nodes, assigned by the registry."""

    forward_s: float = 0.0
    """Seconds spent so far in a draft model's forwards; stays 0 for drafters without one."""

    @abstractmethod
    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Begin a request. prompt: its token ids. Called before the target has read the prompt."""

    @abstractmethod
    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        """Return a tree for the request's text followed by `continuation`, a possible outcome of the round under way.

        The root is the last token of that text. A root-only tree says that there is nothing to propose.
        """

    def propose_many(self, queries: Sequence[DraftQuery], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        """Return `propose` for several requests and outcomes; drafters with a model draft them in the same forwards.

        between_steps: called between a model's draft steps.
        """
        return [self.propose(request, continuation) for request, continuation in queries]

    def draft_behind(self, trees: Mapping[int, int], verdicts: DeviceVerdicts) -> OnItsWay | None:
        """Begin to draft for what a round comes to, before the host knows it; return what is on its way to the host.
        trees: of requests, by their number, which tree was theirs. Their verdicts, and `propose`, come later as always.
        """
        return None

    def following(self, queries: Sequence[DraftQuery]) -> list[Following]:
        """Return the tokens that may follow each continuation, likeliest first, and their probabilities.

        The outcomes of a round are ranked by these. A drafter that returns none is not asked to draft ahead.
        """
        trees = [self.propose(request, continuation) for request, continuation in queries]
        return [
            (tree.tokens[children].tolist(), tree.confidence[children].tolist())
            for tree in trees
            for children in [tree.children(0)]
        ]

    @abstractmethod
    def observe(self, request: int, verdict: Verdict) -> None:
        """Take the verdict's tokens as the request's text. The first verdict of a request is the prefill's."""

    def settle(self) -> None:  # noqa: B027
        """Do the bookkeeping of verdicts that was deferred, off the critical path. Called when the next tree is on its
        way.
        """

    @abstractmethod
    def finish(self, request: int) -> None:
        """Forget the request."""

    def renew(self) -> bool:
        """Take over what was learned elsewhere meanwhile; return whether the verifier must be told anew what is wanted.
        Called while there are no requests.
        """
        return False

    def close(self) -> None:  # noqa: B027
        """Write what is to outlive the worker, which ends."""
