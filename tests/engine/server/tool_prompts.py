"""40 questions that tools answer. `python -m tests.engine.server.tool_prompts URL...` asks servers of one model and
compares their calls, with drafts and without, greedy and sampled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
import jsonschema

_TEXT = {"type": "string"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = {
    "get_weather": _object(
        ["city"],
        city=_TEXT,
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        days={"type": "integer", "minimum": 1, "maximum": 14},
    ),
    "search_files": _object(
        ["pattern"],
        pattern=_TEXT,
        folder=_TEXT,
        recursive={"type": "boolean"},
        limit={"type": "integer", "minimum": 1, "maximum": 100},
    ),
    "send_email": _object(
        ["to", "subject", "body"],
        to={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
        subject={"type": "string", "maxLength": 60},
        body={"type": "string", "maxLength": 200},
        priority={"enum": ["low", "normal", "high"]},
    ),
    "convert_currency": _object(
        ["amount", "source", "target"],
        amount={"type": "number", "minimum": 0},
        source={"type": "string", "pattern": "^[A-Z]{3}$"},
        target={"type": "string", "pattern": "^[A-Z]{3}$"},
    ),
    "create_event": _object(
        ["title", "start"],
        title={"type": "string", "maxLength": 40},
        start=_object(
            ["date", "hour"],
            date={"type": "string", "format": "date"},
            hour={"type": "integer", "minimum": 0, "maximum": 23},
        ),
        guests={"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    ),
    "run_query": _object(
        ["table", "columns"],
        table={"enum": ["users", "orders", "items"]},
        columns={"type": "array", "items": {"enum": ["id", "name", "price", "day"]}, "minItems": 1, "maxItems": 4},
        where={"anyOf": [{"type": "string", "maxLength": 60}, {"type": "null"}]},
        limit={"type": "integer", "minimum": 1, "maximum": 1000},
    ),
    "set_light": _object(
        ["room", "on"],
        room={"enum": ["kitchen", "bedroom", "office"]},
        on={"type": "boolean"},
        level={"type": "integer", "minimum": 0, "maximum": 100},
    ),
    "list_time_zones": _object([]),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
PROMPTS = """
What is the weather in Paris?
Will it rain in Oslo over the next three days?
How warm is it in Madrid, in fahrenheit?
Give me the forecast for Nairobi for a week in celsius.
Is it snowing in São Paulo or "New" York?
Find all Python files below src.
Look for files named *.md, but not in subfolders.
Where is config.yaml? Show at most 5 results.
Search /var/log for *.gz files recursively.
Find files that match test_*.py in tests.
Write an email to ann@example.com that the meeting is moved to Monday.
Tell bob@example.com and eve@example.com that lunch is at noon.
Send a high priority mail to ops@example.com: the server is down.
Email zoe@example.com a short thank-you note.
Write to sam@example.com with the subject "Hello" and one line of text.
How much is 100 euros in US dollars?
Convert 2500 yen to British pounds.
What are 19.99 dollars in Swiss francs?
Change 1e3 INR into EUR.
I have 50 Polish zloty. How many Czech koruna is that?
Plan a call with Ann on 2026-03-04 at 15.
Add "Dentist" to my calendar for 2026-12-01 at 9.
Create an event for the retrospective on 2026-06-30, 14 o'clock, with Bob and Eve.
Remind me of the flight on 2026-07-15 at 6.
Book an hour for planning on 2026-01-02 at 10 with the team.
List the names of all users.
Show the ids and prices of items under 10, at most 20 of them.
Which orders came in on 2026-05-05?
Get the id, name and day of the orders.
Read all columns of users where the name is Ann.
Turn on the kitchen light.
Switch the bedroom light off.
Dim the office to 30 percent.
Make it bright in the kitchen.
Lights out in the office, please.
Which time zones are there?
List every time zone.
What time zones can I choose from?
It is late: turn the bedroom light off.
What is the weather in Rome, and in Lima?
""".strip().splitlines()
assert len(PROMPTS) == 40


def body(prompt: str, temperature: float, drafted: bool) -> dict[str, Any]:
    """Return a request that has to call one tool."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": len(prompt),
        "max_tokens": 300,
        "speculation": {"off": not drafted},
    }


def call_of(answer: dict[str, Any]) -> tuple[str, str]:
    """Return the name and the arguments, which parse and follow the schema."""
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    jsonschema.validate(json.loads(arguments), SCHEMAS[name], jsonschema.Draft202012Validator)
    return name, arguments


def main(urls: list[str], count: int = 40) -> None:
    """Say, for each server and temperature, how many calls are equal to plain decoding's of the first server, and how
    fast they are.
    """
    model = httpx.get(f"{urls[0]}/v1/models", timeout=60).json()["data"][0]["id"]

    def ask(url: str, prompt: str, temperature: float, drafted: bool) -> tuple[tuple[str, str], float, float]:
        sent = body(prompt, temperature, drafted) | {"model": model}
        answer = httpx.post(f"{url}/v1/chat/completions", json=sent, timeout=600).raise_for_status().json()
        return call_of(answer), answer["metrics"]["decoding_s"], answer["metrics"]["mean_accepted_tokens"]

    for temperature in (0.0, 1.0):
        plain = [ask(urls[0], prompt, temperature, False) for prompt in PROMPTS[:count]]
        for url in urls:
            drafted = [ask(url, prompt, temperature, True) for prompt in PROMPTS[:count]]
            equal = sum(one[0] == other[0] for one, other in zip(plain, drafted, strict=True))
            speed = sum(one[1] for one in plain) / sum(one[1] for one in drafted)
            tokens = sum(one[2] for one in drafted) / len(drafted)
            print(
                f"{url} T={temperature}: {equal} of {len(plain)} equal, {speed:.2f}x, {tokens:.2f} tokens a round",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
