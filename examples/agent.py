"""An agent with two tools, with OpenAI's client against `talon serve`: it calls them until it answers.

pip install openai; talon serve --set model=Qwen/Qwen2.5-1.5B-Instruct; python examples/agent.py
"""

from __future__ import annotations

import json
import random
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
question = sys.argv[2] if len(sys.argv) > 2 else "Roll a die of 20 sides, and add 5 to what it shows."
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

NUMBER = {"type": "integer", "minimum": 1, "maximum": 1000}
SCHEMAS = {
    "add": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    "roll": {"type": "object", "properties": {"sides": NUMBER}, "required": ["sides"]},
}
FUNCTIONS = {"add": lambda a, b: a + b, "roll": lambda sides: random.randint(1, sides)}
ABOUT = {"add": "Add two numbers.", "roll": "Roll a die."}
tools = [
    {"type": "function", "function": {"name": name, "description": ABOUT[name], "parameters": schema}}
    for name, schema in SCHEMAS.items()
]

messages = [{"role": "user", "content": question}]
for turn in range(5):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=tools,
        tool_choice="auto" if turn else "required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls or answer.choices[0].finish_reason != "tool_calls":
        break
    for call in message.tool_calls:
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))  # the arguments follow the schema
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
print(messages[-1].content if not isinstance(messages[-1], dict) else messages[-1]["content"])
