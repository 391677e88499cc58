"""OpenVINO GenAI, one request at a time. Runs under the Python that has `openvino-genai`; imports nothing of Talon.

Arguments: a GGUF file, threads, and the tokens that prompt lookup drafts (0: plain decoding).
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    model, threads, drafted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if drafted else {})}
    pipeline = genai.LLMPipeline(model, "CPU", **options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started, tokens = time.perf_counter(), []
        for prompt in asked["prompts"]:
            config = genai.GenerationConfig()
            config.max_new_tokens = asked["max_tokens"]
            if drafted:
                config.num_assistant_tokens, config.max_ngram_size = drafted, 3
            ids = ov.Tensor(np.asarray([prompt], np.int64))
            inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(prompt)), np.int64)))
            tokens.append(len(pipeline.generate(inputs, config).tokens[0]))
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
