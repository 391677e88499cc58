"""A stream without any client library: server-sent events over plain HTTP.

pip install httpx; talon serve; python examples/stream_with_httpx.py
"""

from __future__ import annotations

import json
import sys

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
body = {
    "model": model,
    "messages": [{"role": "user", "content": "Give three tips for staying healthy."}],
    "max_tokens": 80,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
    answer.raise_for_status()
    for line in answer.iter_lines():
        if not line.startswith("data: {"):  # an empty line, a comment, or data: [DONE]
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            sys.exit(chunk["error"]["message"])
        for choice in chunk["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
        if chunk["usage"]:
            print(f"\n{chunk['usage']['completion_tokens']} tokens in {chunk['metrics']['rounds']} rounds")
