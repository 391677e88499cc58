"""smolagents: a question with a tool, another one in the same conversation, and a cancelled answer."""

import sys
import time

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage


@tool
def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: its name
    """
    return f"{city}: sunny"


def model_of(tokens: int) -> OpenAIServerModel:
    """Return the model, whose answers have so many tokens at most."""
    return OpenAIServerModel("coder", f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_tokens=tokens)


agent = ToolCallingAgent(tools=[weather], model=model_of(100), max_steps=3, verbosity_level=0)
agent.run("What is the weather in Rome and in Oslo?")
agent.run("And in Bern?", reset=False)
answer = model_of(2000).generate_stream([ChatMessage(role="user", content="Write 2000 words on Rome.")])
next(answer)
answer.close()
time.sleep(1)
