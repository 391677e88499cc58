"""A drafter of your own in 30 lines: it proposes what followed the last token the last time that token occurred.

It can be as wrong as it likes: the text is the target's, only the speed is the drafter's.

python examples/own_drafter.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from drafters.base import METHODS, Drafter, Method, TokenTree, Verdict
from engine import Config, Engine, SamplingParams
from engine.config import DEMO


class Parrot(Drafter):
    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    @classmethod
    def from_config(cls, config: Config) -> Parrot:
        return cls()

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.texts[request] = list(prompt)

    def observe(self, request: int, verdict: Verdict) -> None:
        self.texts[request] += verdict.tokens

    def finish(self, request: int) -> None:
        del self.texts[request]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        text = [*self.texts[request], *continuation]
        for at in range(len(text) - 2, -1, -1):
            if text[at] == text[-1]:
                chain = text[at + 1 : at + 6]
                return TokenTree.chain(text[-1], chain, [0.5**depth for depth in range(1, len(chain) + 1)])
        return TokenTree.root_only(text[-1])


async def main(config: str) -> None:
    METHODS["parrot"] = Method(f"{__name__}:Parrot")  # in this process alone, hence "inproc" below
    question, sampling = "Repeat ten times: the cat sat on the mat.", SamplingParams(max_tokens=80)
    texts = []
    for method in ("none", "parrot"):
        async with await Engine.start(config, method=method, transport="inproc") as engine:
            result = await engine.generate(question, sampling)
        texts.append(result.text)
        print(f"{method}: {result.metrics.mean_accepted_tokens:.2f} tokens a round")
    print(texts[1], "\nthe same text:", texts[0] == texts[1])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(DEMO)))
