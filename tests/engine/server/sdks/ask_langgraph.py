"""langgraph: a question with a tool, another one in the same conversation, and a cancelled answer."""

import asyncio
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: sunny"


def model_of(tokens: int) -> ChatOpenAI:
    """Return the model, whose answers have so many tokens at most."""
    return ChatOpenAI(
        model="coder", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_completion_tokens=tokens
    )


async def main() -> None:
    """Take the turns."""
    graph = create_agent(model_of(100), [weather], system_prompt="Use the tool.", checkpointer=InMemorySaver())
    for question in ("What is the weather in Rome and in Oslo?", "And in Bern?"):
        asked = {"messages": [("user", question)]}
        try:
            await graph.ainvoke(asked, {"configurable": {"thread_id": "1"}, "recursion_limit": 6})
        except GraphRecursionError:  # a small model may call again and again
            print("the model goes on calling")
    free = create_agent(model_of(2000), [])
    answer = free.astream({"messages": [("user", "Write 2000 words on Rome.")]}, stream_mode="messages")
    await anext(answer)
    await answer.aclose()  # which its synchronous stream does not pass on
    await asyncio.sleep(1)


asyncio.run(main())
