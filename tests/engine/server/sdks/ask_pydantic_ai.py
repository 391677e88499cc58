"""pydantic-ai: a question with a tool, another one in the same conversation, and a cancelled answer."""

import asyncio
import sys

from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits, capture_run_messages
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("coder", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
agent = Agent(model, instructions="Use the tool.", model_settings={"temperature": 0.0, "max_tokens": 100})


@agent.tool_plain
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


async def ask(question: str, said: list[ModelMessage]) -> list[ModelMessage]:
    """Ask a question, and return the conversation so far. A small model may call again and again."""
    with capture_run_messages() as messages:
        try:
            await agent.run(question, message_history=said, usage_limits=UsageLimits(request_limit=3))
        except UsageLimitExceeded:
            print("the model goes on calling")
    return list(messages)


async def main() -> None:
    """Take the turns."""
    said = await ask("What is the weather in Rome and in Oslo?", [])
    await ask("And in Bern?", said)
    async with Agent(model).run_stream("Write 2000 words on Rome.") as answer:
        async for _ in answer.stream_text(delta=True):
            break
    await asyncio.sleep(1)


asyncio.run(main())
