"""openai-agents, streamed: a question with a tool, another one in the same conversation, and a cancelled answer."""

import asyncio
import sys
from typing import Any

from agents import Agent, MaxTurnsExceeded, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


async def ask(agent: Any, asked: list[Any]) -> list[Any]:
    """Ask a question, and return the conversation so far. A small model may call again and again."""
    answer = Runner.run_streamed(agent, asked, max_turns=3)
    try:
        async for _ in answer.stream_events():
            pass
    except MaxTurnsExceeded:
        print("the model goes on calling")
    return list(answer.to_input_list())


async def main(url: str) -> None:
    """Take the turns."""
    model = OpenAIChatCompletionsModel("coder", AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    settings = ModelSettings(temperature=0, max_tokens=100)
    agent = Agent("a", instructions="Use the tool.", model=model, model_settings=settings, tools=[weather])
    said = await ask(agent, [{"role": "user", "content": "What is the weather in Rome and in Oslo?"}])
    await ask(agent, [*said, {"role": "user", "content": "And in Bern?"}])
    answer = Runner.run_streamed(Agent("b", model=model), "Write 2000 words on Rome.")
    async for event in answer.stream_events():
        if event.type == "raw_response_event":
            break
    answer.cancel()
    await asyncio.sleep(1)


asyncio.run(main(sys.argv[1]))
