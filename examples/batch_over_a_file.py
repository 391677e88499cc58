"""Answers to every line of a file, many at once and without a server: JSON lines with `prompt` in, with `answer` out.

python examples/batch_over_a_file.py prompts.jsonl answers.jsonl
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from engine import Engine, SamplingParams
from engine.config import DEMO


async def answers(prompts: list[str], config: str) -> list[str]:
    async with await Engine.start(config) as engine:  # its queue bounds how many are under way
        sampling = SamplingParams(max_tokens=60)
        results = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    return [result.text for result in results]


def main(source: Path, target: Path, config: str = str(DEMO)) -> None:
    prompts = [json.loads(line)["prompt"] for line in source.read_text("utf8").splitlines()]
    with target.open("w", encoding="utf8") as file:
        for prompt, answer in zip(prompts, asyncio.run(answers(prompts, config)), strict=True):
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
