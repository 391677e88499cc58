"""Suffix drafting: trees from the session index, over the request's own text and its owner's earlier answers. The index
may have public answers too: a datastore of what the target answered to prompts of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drafters.parts import naming
from engine.config import Config
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.files.cache_folder import CacheFolder
from engine.weights.identity import model_identity
from retrieval_index.compiler import release_compiler
from retrieval_index.datastore import Datastore
from retrieval_index.saved_answers import SavedAnswers
from retrieval_index.session_index import GREEDY, SessionIndex

WARM_UP = 512
"""Tokens of the answer that warms up: too long for the store that a new request begins with."""


class SuffixDrafter(Drafter):
    """The likeliest `budget` nodes of the index's mixture; its probabilities are learned and serve as c(v) directly.

    capacity: tokens of finished answers kept for later requests of the same owner (`Speculation.owner`); beyond it, the
    least recently used owners are forgotten first, and of one owner the oldest answers. answers: public ones, from
    which every request is drafted. 0 without `answers`: each request sees only its own text. saved: finished answers on
    disk. shared_noise: where the target samples, rank by the noise of its draw.
    """

    calibrated = True

    def __init__(
        self,
        budget: int = 32,
        length: int = 24,
        capacity: int = 1_000_000,
        answers: Datastore | None = None,
        shared_noise: bool = True,
        saved: SavedAnswers | None = None,
    ):
        self.budget, self.length, self.shared_noise = budget, length, shared_noise
        self._sampling: dict[int, SamplingParams] = {}
        self.index = SessionIndex(capacity, [] if answers is None else [*answers.texts()], saved)

    @classmethod
    def from_config(cls, config: Config) -> SuffixDrafter:
        compile_kernels()
        options = config.drafter
        with naming("drafter.answers"):
            answers = None if (folder := options.answers_folder) is None else Datastore(Path(folder))
        return cls(options.budget, answers=answers, shared_noise=options.shared_noise, saved=_saved(config))

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._sampling[request] = sampling if self.shared_noise else GREEDY
        self.index.start(request, prompt, sampling.owner)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return self.index.draft(request, continuation, self.budget, self.length, self._sampling[request])

    def observe(self, request: int, verdict: Verdict) -> None:
        self.index.append(request, verdict.tokens)

    def finish(self, request: int) -> None:
        self.index.finish(request)
        del self._sampling[request]

    def close(self) -> None:
        if self.index.saved is not None:
            self.index.saved.folder.close()


def _saved(config: Config) -> SavedAnswers | None:
    """Return the answers in the configuration's cache, if it names one."""
    options = config.verifier
    if options.cache is None:
        return None
    folder = CacheFolder(Path(options.cache), int(options.cache_gb * 1e9))
    return SavedAnswers(folder, model_identity(config.model))


def compile_kernels() -> None:
    """Compile kernels by calling them, before the worker is ready and not in a request."""
    warm_up = SuffixDrafter(budget=4)
    warm_up.start(0, [1, 2, 1], SamplingParams(temperature=1.0))
    warm_up.observe(0, Verdict(warm_up.propose(0, [2]), [0], [*range(WARM_UP)]))  # enough tokens that its store grows
    warm_up.finish(0)
    release_compiler()
