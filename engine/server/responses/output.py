"""The items of a response's output: messages, reasoning and calls, and the events by which they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.answers import Chunk
from engine.server.responses.functions import SHELL, InputReader, ShownTool, shell_action
from engine.server.tools.blocks import Block, Change

_PREFIXES = {"content": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc", SHELL: "lsh"}
_DELTAS = {
    "content": "output_text",
    "reasoning": "reasoning_text",
    "function": "function_call_arguments",
    "custom": "custom_tool_call_input",
}


class OutputItems:
    """The items of one response. response: its id. tools: those that the model has seen."""

    def __init__(self, response: str, tools: Sequence[ShownTool]):
        self._response = response.removeprefix("resp_")
        self._tools = {tool.function["name"]: tool for tool in tools}
        self._inputs: dict[int, InputReader] = {}
        """The reader of what has arrived, for each call of a tool that takes a text."""

    def events(self, change: Change, ending: str = "completed") -> list[Chunk]:
        """Return the events of a change. ending: the status of an item that ends with it."""
        block, place = change.block, {"output_index": change.block.number}
        kind = self._kind(block)
        at = {"item_id": self._id(block), **place}
        inner = at if block.kind == "call" else at | {"content_index": 0}
        if change.what == "begins":
            added: list[Chunk] = [
                {"type": "response.output_item.added", **place, "item": self.whole(block, "in_progress")}
            ]
            if block.kind != "call":
                added.append({"type": "response.content_part.added", **inner, "part": _part(block)})
            return added
        name = f"response.{_DELTAS.get(kind)}"
        more: Chunk = {"logprobs": []} if kind == "content" else {}
        if change.what == "grows":
            grown = self._grown(change)
            return [{"type": f"{name}.delta", **inner, "delta": grown, **more}] if grown else []
        done: list[Chunk] = [] if kind == SHELL else [{"type": f"{name}.done", **inner, **self._said(block), **more}]
        if block.kind != "call":
            done.append({"type": "response.content_part.done", **inner, "part": _part(block)})
        return [*done, {"type": "response.output_item.done", **place, "item": self.whole(block, ending)}]

    def whole(self, block: Block, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            return self._call(block, head)
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _call(self, block: Block, head: dict[str, Any]) -> dict[str, Any]:
        tool = self._tools.get(block.name)
        head |= {"call_id": block.call_id}
        if tool is None:
            return {"type": "function_call", **head, "name": block.name, "arguments": block.text}
        if tool.kind == SHELL:
            return {"type": "local_shell_call", **head, "action": shell_action(block.text)}
        head |= {"name": tool.name} | ({} if tool.namespace is None else {"namespace": tool.namespace})
        if tool.kind == "custom":
            return {"type": "custom_tool_call", **head, "input": InputReader().feed(block.text)}
        return {"type": "function_call", **head, "arguments": block.text}

    def _grown(self, change: Change) -> str:
        """Return what is sent of a change's text: of a tool that takes a text the text, of the client's
        shell nothing.
        """
        kind = self._kind(change.block)
        if kind == "custom":
            return self._inputs.setdefault(change.block.number, InputReader()).feed(change.text)
        return "" if kind == SHELL else change.text

    def _said(self, block: Block) -> dict[str, Any]:
        """Return the fields that end an item with all that it says."""
        if block.kind != "call":
            return {"text": block.text}
        call = self._call(block, {})
        return {name: call[name] for name in (("input",) if "input" in call else ("arguments", "name"))}

    def _kind(self, block: Block) -> str:
        if block.kind != "call":
            return block.kind
        return self._tools[block.name].kind if block.name in self._tools else "function"

    def _id(self, block: Block) -> str:
        """Return an id of a block's item, the same in all events."""
        return f"{_PREFIXES[self._kind(block)]}_{self._response}_{block.number}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
