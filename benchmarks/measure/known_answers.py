"""Answers of the target, kept with its hidden states, so that drafters run over them without it.

The target's draw at a position depends on the text before it alone, so a round accepts the path that the answer
follows, at any temperature, and what it emits is what the target would have emitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from drafters.lookup.prompt_lookup import PromptLookup
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams, own_defaults
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from engine.model.target import Target
from engine.sampling.sampler import Sampler, verify
from engine.wire.messages import Rates

_ROOM = 64  # positions that the largest tree takes beyond the answer


@dataclass(frozen=True)
class KnownAnswer:
    """An answer of the target, with its hidden states. layers: whose hidden states are kept. states: [prompt + answer -
    1, layers, hidden] uint16, or None.
    """

    suite: str
    prompt: list[int]
    tokens: list[int]
    sampling: SamplingParams
    layers: tuple[int, ...] = ()
    states: NDArray[np.uint16] | None = None

    def features(self, layers: Sequence[int], start: int, end: int) -> NDArray[np.uint16] | None:
        """Return the states of some of the kept layers at these positions, as a `Verdict` carries them."""
        if not layers or self.states is None:
            return None
        return self.states[start:end, [self.layers.index(layer) for layer in layers]]


def record(
    target: Target,
    layers: Iterable[int],
    suites: dict[str, list[list[int]]],
    sampling: SamplingParams,
    progress: Progress,
) -> list[KnownAnswer]:
    """Record the target's answers. Prompts that leave no space in the context are left out; ConfigError if all do."""
    task = progress.add_task(f"answers, T = {sampling.temperature:g}", total=sum(map(len, suites.values())))
    drafter, found = PromptLookup(), []
    drafter.feature_layers = tuple(sorted(set(layers)))
    sampling = sampling.over(own_defaults(target.facts.generation, target.name))
    for suite, prompts in suites.items():
        for prompt in prompts:
            progress.advance(task)
            if len(prompt) + sampling.max_tokens + _ROOM > target.context:
                continue
            verdicts = list(answer(target, drafter, prompt, sampling, _ROOM))
            tokens = [token for verdict in verdicts for token in verdict.tokens]
            states = [verdict.features for verdict in verdicts if verdict.features is not None]
            kept = np.concatenate(states) if states else None
            found.append(KnownAnswer(suite, prompt, tokens, sampling, drafter.feature_layers, kept))
    if left_out := sum(map(len, suites.values())) - len(found):
        progress.console.print(f"{left_out} prompts are left out: with {sampling.max_tokens} tokens they do not fit")
    if not found:
        raise ConfigError(f"--questions: no prompt fits into {target.context} tokens; lower --max-tokens")
    return found


def follow(
    drafter: Drafter,
    request: int,
    known: KnownAnswer,
    propose: Callable[[int], TokenTree],
    rates: Callable[[], Rates] = Rates,
) -> Iterator[tuple[Verdict, float]]:
    """Yield every round after the prefill, before the drafter has received its verdict, and the seconds that drafting
    took.

    propose: called with the request, returns the tree to verify. rates: what the cost model estimates at present.
    Drafters that read the target's likeliest tokens (`Drafter.successors`) cannot follow; a model never rests.
    """

    def verdict_of(tree: TokenTree, path: list[int], tokens: list[int], start: int, end: int) -> Verdict:
        now, features = rates(), known.features(drafter.feature_layers, start, end)
        return Verdict(tree, path, tokens, features, token_s=now.token_s, row_tokens=now.row_tokens)

    drafter.start(request, known.prompt, known.sampling)
    read, root, emitted = len(known.prompt), TokenTree.root_only(known.prompt[-1]), 1
    drafter.observe(request, verdict_of(root, [0], known.tokens[:1], 0, read))
    while emitted < len(known.tokens):
        started = time.perf_counter()
        tree = propose(request)
        draft_s = time.perf_counter() - started
        path = accepted(tree, known.tokens[emitted:])
        tokens = known.tokens[emitted : emitted + len(path)]
        verdict = verdict_of(tree, path, tokens, read, read + len(path))
        yield verdict, draft_s
        drafter.observe(request, verdict)
        drafter.settle()
        read, emitted = read + len(path), emitted + len(path)
    drafter.finish(request)


def accepted(tree: TokenTree, answer: Sequence[int]) -> list[int]:
    """Return the nodes, root first, that the answer follows; at its end one token is left for the bonus."""
    path = [0]
    for token in answer[:-1]:
        if (child := tree.child(path[-1], token)) is None:
            break
        path.append(child)
    return path


def answer(
    target: Target, drafter: Drafter, prompt: list[int], sampling: SamplingParams, budget: int
) -> Iterator[Verdict]:
    """Yield every round of one request, drafter and target in turn; the first verdict is the prefill's."""
    sampling = sampling.over(own_defaults(target.facts.generation, target.name))
    cache = target.new_cache(len(prompt) + sampling.max_tokens + budget)
    sampler = Sampler(sampling, prompt, target.eos_tokens, target.vocab_size)
    drafter.start(0, prompt, sampling)
    logits, features = target.prefill(cache, prompt, drafter.feature_layers)
    tree, path = TokenTree.root_only(prompt[-1]), [0]
    tokens = [sampler.draw(sampler.choices(logits[None])[0])]
    while True:
        verdict = Verdict(tree, path, tokens, None if features is None else bfloat16_bits(features))
        yield verdict
        if sampler.finish_reason is not None:
            break
        drafter.observe(0, verdict)
        tree = drafter.propose(0)
        logits, features = target.verify(cache, tree, drafter.feature_layers)
        path, tokens = verify(tree, logits, sampler)
        features = None if features is None else features[path]
        cache.commit(path)
    drafter.finish(0)
    target.release(cache)
