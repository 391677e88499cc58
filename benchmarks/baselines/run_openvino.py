"""OpenVINO GenAI. Runs under the Python that has `openvino-genai`; imports nothing of Talon.

Arguments: a GGUF file, threads, requests at once at most, and the tokens that prompt lookup drafts (0: plain decoding).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    model, threads, most, drafted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, most, False
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if drafted else {})}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
    config = genai.GenerationConfig()
    config.eos_token_id = pipeline.get_tokenizer().get_eos_token_id()
    if drafted:
        config.num_assistant_tokens, config.max_ngram_size = drafted, 3
    print(json.dumps({"ready": True}), flush=True)
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        config.max_new_tokens = asked["max_tokens"]
        waiting, started = list(enumerate(asked["prompts"])), time.perf_counter()
        running: dict[int, Any] = {}
        tokens = [0] * len(waiting)
        while waiting or running:
            while waiting and len(running) < asked["at_once"]:
                place, prompt = waiting.pop(0)
                running[place] = pipeline.add_request(number, ov.Tensor(np.asarray([prompt], np.int64)), config)
                number += 1
            pipeline.step()
            for place in [place for place, handle in running.items() if str(handle.get_status()).endswith("FINISHED")]:
                tokens[place] = len(running.pop(place).read_all()[0].generated_ids)
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
