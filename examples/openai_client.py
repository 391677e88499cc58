"""OpenAI's client against `talon serve`: an answer, a stream, and JSON that follows a schema.

pip install openai; talon serve; python examples/openai_client.py
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is 3 + 4?"}], max_tokens=40, temperature=0
)
print(answer.choices[0].message.content)
print(answer.usage.completion_tokens, "tokens;", answer.metrics["speculative_decoding"])

stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Count to ten."}], max_tokens=60, temperature=0, stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

person = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Invent a person."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": person}},
    max_tokens=100,
)
print(json.dumps(json.loads(answer.choices[0].message.content)))  # always valid, unless max_tokens cut it off
