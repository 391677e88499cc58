"""Claude Code's billing line. It stands first in the system text and changes from conversation to conversation, so that
no prompt after it would be found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.server.messages.schema import CountRequest, TextBlock

BILLING_LINE = "x-anthropic-billing-header"


def without_billing_line(system: str | Sequence[TextBlock] | None) -> list[str]:
    """Return the texts of the system's blocks, without the billing line and what it leaves empty."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    if not has_billing_line(system):
        return texts
    first = texts[0].partition("\n")[2].lstrip("\n")
    return [first, *texts[1:]] if first else texts[1:]


def has_billing_line(system: str | Sequence[TextBlock] | None) -> bool:
    """Return whether the system text begins with the billing line."""
    first = system if isinstance(system, str) else system[0].text if system else ""
    return first.startswith(f"{BILLING_LINE}:")


def without_effect(body: CountRequest) -> list[str]:
    """Return the request's fields that change no answer, the billing line among them."""
    return [*body.ignored, *([f"system: {BILLING_LINE}"] if has_billing_line(body.system) else [])]
