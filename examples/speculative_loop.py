"""Speculative decoding in one function: propose, verify, commit. Read this first.

`speculate` gives the text that the engine gives, one request at a time and without processes, batches, cost model or
recovery: `engine.verifier.loop` is this loop for many requests.

python examples/speculative_loop.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drafters.base import Drafter, Verdict
from drafters.registry import build
from engine.config import DEMO, load
from engine.core.batch import Segment
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.target import Target
from engine.sampling.sampler import Sampler, verify
from engine.text.encode import encode_text
from engine.weights.resolve import resolved
from engine.weights.tokenizer import tokenizer_of


def speculate(target: Target, drafter: Drafter, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Answer a prompt, token ids in and out. Every token is drawn by the target."""
    cache = target.open_cache(len(prompt) + sampling.max_tokens)
    sampler = Sampler(sampling, prompt, target.eos_tokens, target.vocab_size)
    drafter.start(0, prompt, sampling)

    # Read the prompt: its last logits give the first token.
    logits, _ = target.run([Segment.of_text(prompt, cache, "last")])
    cache.commit(range(len(prompt)))
    answer = [sampler.draw(sampler.choices(logits)[0])]
    drafter.observe(0, Verdict(TokenTree.root_only(prompt[-1]), path=[0], tokens=answer[:]))

    while sampler.finish_reason is None:
        # Propose: a tree of guesses; its root is the last token of the text, whose keys are not in the cache yet.
        tree = drafter.propose(0)

        # Verify: one forward over all nodes; each attends to the text and to its own ancestors. Then the target draws
        # its token at the root, and the walk goes down while the tree contains what was drawn; the last is the bonus.
        logits, _ = target.run([Segment.of_tree(tree, cache)])
        path, tokens = verify(tree, logits, sampler)

        # Commit: keep the keys and values of the accepted path, and tell the drafter.
        cache.commit(path)
        answer += tokens
        drafter.observe(0, Verdict(tree, path, tokens))

    drafter.finish(0)
    target.release(cache)
    return answer


def main(config: str) -> None:
    settings = resolved(load(config))
    tokenizer, target = tokenizer_of(settings), Target.load(settings.model)
    prompt = encode_text(tokenizer, "Repeat ten times: the cat sat on the mat.")
    print(tokenizer.decode(speculate(target, build(settings), prompt, SamplingParams(max_tokens=80))))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(DEMO))
