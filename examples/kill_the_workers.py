"""Nothing is lost when a worker dies: verifier and drafter are killed in the middle of an answer, which goes on as if
nothing had been.

python examples/kill_the_workers.py
"""

from __future__ import annotations

import asyncio
import os
import sys

from engine import Engine, SamplingParams
from engine.config import DEMO

PROMPT = "Write a short story about a lighthouse keeper."
SAMPLING = SamplingParams(max_tokens=96, temperature=1.0, seed=7)


async def main(config: str) -> None:
    # in mode async the drafter is a process of its own, which is killed too
    async with await Engine.start(config, mode="async") as engine:
        undisturbed = await engine.generate(PROMPT, SAMPLING)
        pieces, killed = 0, False
        async with engine.stream(PROMPT, SAMPLING) as stream:
            async for piece in stream:
                print(piece.text, end="", flush=True)
                pieces += len(piece.token_ids)
                if pieces > 20 and not killed:
                    killed = True
                    print("\n--- kill -9 of every worker ---")
                    await asyncio.create_subprocess_exec(
                        "pkill", "-KILL", "-P", str(os.getpid()), "-f", "engine.worker"
                    )
        assert stream.result is not None
        same = stream.result.token_ids == undisturbed.token_ids
        print(f"\n--- {'the same' if same else 'ANOTHER'} text as without: {len(undisturbed.token_ids)} tokens ---")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(DEMO)))
