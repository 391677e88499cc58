"""The drafter of a server that learns (`talon serve --learn`): an owner's requests get the head learned from its texts.

Heads appear in a folder, in a subfolder for each owner, while the engine serves. They are taken over while there are no
requests, so none changes heads on its way. Whoever has none is drafted for as without `--learn`. An owner's head sees
and drafts for requests of this owner alone; retrieval keeps its own memories by owner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from drafters.heads.head_drafter import HeadDrafter
from drafters.hybrid.hybrid import HybridDrafter
from engine.core.drafter_protocol import BetweenSteps, Drafter, Verdict
from engine.core.errors import first_line
from engine.core.outcomes import DraftQuery, Following
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.files.kept_texts import shelf_of
from engine.weights.installed_head import learned_heads


class LearnedDrafter(Drafter):
    """Drafts with the head of a request's owner. general: drafts for owners without one; memories: the retrieval
    drafters that all share; load: reads a head in a folder; folder: of the heads; budget: maximum nodes of a tree.
    """

    def __init__(
        self,
        general: Drafter,
        memories: Sequence[Drafter],
        load: Callable[[Path], HeadDrafter],
        folder: Path,
        budget: int,
    ):
        self.general, self.memories, self.budget = general, memories, budget
        self._load, self._folder = load, folder
        self._found: dict[str, Path] = {}
        self._learned: dict[str, HybridDrafter] = {}  # by the owner's name on the disk
        self._drafting: dict[int, Drafter] = {}  # for each request
        self.calibrated = general.calibrated
        if not self.renew():
            self._describe()

    def renew(self) -> bool:
        if (found := learned_heads(self._folder)) == self._found:
            return False
        for name in self._learned.keys() - found.keys():
            self._learned.pop(name).head.close()
        for name, place in found.items():
            if self._found.get(name) != place:
                self._take_over(name, place)
        self._found = found
        self._describe()
        return True

    def _take_over(self, name: str, place: Path) -> None:
        """Load an owner's head in the place of an older one, which goes on if the new one cannot be used."""
        try:
            head = self._load(place)
        except Exception as error:  # whatever is wrong with a file must not keep a worker from starting
            print(f"talon: drafter.learned={place}: not taken over: {first_line(error)}", file=sys.stderr)
            return
        if name in self._learned:
            self._learned[name].head.close()
        self._learned[name] = HybridDrafter(head, self.memories, self.budget)

    def _describe(self) -> None:
        """Ask the verifier for what all parts want together."""
        parts = self._parts
        self.feature_layers = tuple(sorted({layer for part in parts for layer in part.feature_layers}))
        self.successors = max(part.successors for part in parts)
        self.together = max(part.together for part in parts)
        self.rests = any(part.rests for part in parts)
        self.draft_s, self.read_s = (max(getattr(part, name) for part in parts) for name in ("draft_s", "read_s"))

    @property
    def _parts(self) -> list[Drafter]:
        return [self.general, *self._learned.values()]

    @property
    def forward_s(self) -> float:  # type: ignore[override]
        return sum(part.forward_s for part in self._parts)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        owner = sampling.owner
        own = None if owner is None else self._learned.get(shelf_of(owner))
        self._drafting[request] = self.general if own is None else own
        self._drafting[request].start(request, prompt, sampling)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return self.propose_many([DraftQuery(request, continuation)])[0]

    def propose_many(self, queries: Sequence[DraftQuery], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        trees: dict[int, TokenTree] = {}
        for part, rows in self._grouped(queries):
            between = between_steps and _of_rows(between_steps, rows, trees)
            proposed = part.propose_many([queries[row] for row in rows], between)
            trees |= {row: tree.marked(part.source) for row, tree in zip(rows, proposed, strict=True)}
        return [trees[row] for row in range(len(queries))]

    def following(self, queries: Sequence[DraftQuery]) -> list[Following]:
        found: dict[int, Following] = {}
        for part, rows in self._grouped(queries):
            found |= dict(zip(rows, part.following([queries[row] for row in rows]), strict=True))
        return [found[row] for row in range(len(queries))]

    def _grouped(self, queries: Sequence[DraftQuery]) -> Iterator[tuple[Drafter, list[int]]]:
        """Yield who drafts, and the rows of `queries` that it drafts for."""
        parts = [self._drafting[request] for request, _ in queries]
        for part in dict.fromkeys(parts):
            yield part, [row for row, one in enumerate(parts) if one is part]

    def observe(self, request: int, verdict: Verdict) -> None:
        part = self._drafting[request]
        if verdict.features is not None and part.feature_layers != self.feature_layers:
            columns = [self.feature_layers.index(layer) for layer in part.feature_layers]
            verdict = replace(verdict, features=verdict.features[:, columns] if columns else None)
        part.observe(request, verdict)

    def settle(self) -> None:
        for part in self._parts:
            part.settle()

    def finish(self, request: int) -> None:
        if (part := self._drafting.pop(request, None)) is not None:
            part.finish(request)

    def close(self) -> None:
        self.general.close()
        for learned in self._learned.values():
            learned.head.close()


def _of_rows(between_steps: BetweenSteps, rows: Sequence[int], done: dict[int, TokenTree]) -> BetweenSteps:
    """Return what is called between the steps of some of the rows, while those of `done` have their trees."""

    def between(so_far: Callable[[], dict[int, TokenTree]]) -> None:
        between_steps(lambda: {**done, **{rows[row]: tree for row, tree in so_far().items()}})

    return between
