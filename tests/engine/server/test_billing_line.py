"""The line that Claude Code puts before its system text and changes from conversation to conversation."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.server.messages.billing import BILLING_LINE
from engine.server.messages.schema import CountRequest
from engine.server.messages.translate import chat_fields
from tests.engine.server.figures import metric, until
from tests.engine.server.process import ServerProcess

LINE = f"{BILLING_LINE}: cc_version=1.0.0.abc; cc_entrypoint=cli;"
SYSTEM, ASKED = "Be brief.", [{"role": "user", "content": "Hi"}]


def block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def said(system: Any) -> list[dict[str, Any]]:
    """The chat messages of a request with that system text."""
    body = {"model": "tiny", "messages": ASKED} | ({} if system is None else {"system": system})
    messages: list[dict[str, Any]] = chat_fields(CountRequest.model_validate(body))["messages"]
    return messages


@pytest.mark.parametrize(
    ("system", "without"),
    [
        ([block(LINE), block(SYSTEM)], SYSTEM),
        ([block(LINE), block(SYSTEM), block("Now.")], f"{SYSTEM}\nNow."),
        (f"{LINE}\n{SYSTEM}", SYSTEM),
        ([block(f"{LINE}\n\n{SYSTEM}")], SYSTEM),
        ([block(LINE)], None),
        (LINE, None),
    ],
)
def test_the_billing_line_is_no_part_of_the_prompt(system: Any, without: str | None) -> None:
    assert said(system) == said(without)


@pytest.mark.parametrize("system", [[block(SYSTEM), block(LINE)], f"{SYSTEM}\n{LINE}", [block(f" {LINE}")]])
def test_the_same_words_elsewhere_are_text(system: Any) -> None:
    assert LINE in said(system)[0]["content"]


def test_a_conversation_finds_what_another_with_a_later_billing_line_has_read(tool_server: ServerProcess) -> None:
    text = "You are a careful helper who answers in few words and asks before anything is deleted. " * 4

    def hits(line: str) -> float:
        body = {"model": "tiny", "max_tokens": 1, "messages": ASKED, "system": [block(line), block(text)]}
        httpx.post(f"{tool_server.url}/v1/messages", json=body, timeout=60).raise_for_status()
        return metric(tool_server, "vllm:prefix_cache_hits_total")

    before = hits(LINE)
    assert hits(LINE.replace("abc", "def")) - before >= len(text) // 16 * 16
    until(lambda: any(f"ignored field: system: {BILLING_LINE}:" in line["event"] for line in tool_server.lines))
