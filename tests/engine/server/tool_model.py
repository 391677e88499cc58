"""A tiny model whose chat template takes tools and reasoning, as Qwen's do, and which has tokens to fill in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import tiny_tokenizer
from tests.engine.weights.tiny_gguf import save_tiny_gguf

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> <tool_call> <think>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
FILL_IN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}


def tool(name: str = "weather", parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a tool as OpenAI writes it."""
    schema = WEATHER if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": "Tell it.", "parameters": schema}}


def save_tool_model(folder: Path, guard: str = "") -> str:
    """Save a random Llama that calls tools where it has to. guard: the first part of its chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(FILL_IN, special_tokens=True)
    tokenizer.chat_template = guard + TEMPLATE
    return save_tiny_gguf(folder, tokenizer, vocab_size=264, max_position_embeddings=4096)
