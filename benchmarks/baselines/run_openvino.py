"""Runs OpenVINO GenAI, under the Python that has `openvino-genai`; it imports nothing of Talon.

Arguments: a GGUF file, threads, requests at once at most, and what drafts: plain (nothing), lookup (the prompt) or the
GGUF file of a smaller model.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

_DRAFTED = 5  # tokens of a draft


def main() -> None:
    model, source = sys.argv[1], sys.argv[4]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, int(sys.argv[3]), True
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
    drafts: dict[str, Any] = {"prompt_lookup": True} if source == "lookup" else {}
    if source not in ("plain", "lookup"):
        drafts["draft_model"] = genai.draft_model(source, "CPU", **options)
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options | drafts)
    config = genai.GenerationConfig()
    config.eos_token_id = pipeline.get_tokenizer().get_eos_token_id()
    if drafts:
        config.num_assistant_tokens = _DRAFTED
    if source == "lookup":
        config.num_assistant_tokens, config.max_ngram_size = 10, 3
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
