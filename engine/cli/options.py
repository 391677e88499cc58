"""Command-line options for one request, and what they are converted to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import RequestError
from engine.core.grammar import Grammar
from engine.core.params import Speculation

_DRAW, _FORM, _SPEED = "How tokens are drawn", "What the answer looks like", "How it is drafted for"

PresencePenalty = Annotated[
    float, typer.Option(rich_help_panel=_DRAW, help="Over 0, discourage every token that is in the answer already.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(rich_help_panel=_DRAW, help="Over 0, discourage tokens the more often they came.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=VALUE",
        rich_help_panel=_DRAW,
        help="Add -100 (never) to 100 (always) to one token's logit: 42=-100; may be given again.",
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0, max=20, rich_help_panel=_DRAW, help="With --json: log-probabilities, with so many alternatives a token."
    ),
]
PromptLogprobs = Annotated[
    int | None, typer.Option(rich_help_panel=_DRAW, help="The same for the tokens of the prompt.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", rich_help_panel=_FORM, help="Any JSON object.")]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE",
        rich_help_panel=_FORM,
        help='JSON of this schema: \'{"type": "array", "items": {"type": "integer"}}\'. @FILE reads one.',
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(rich_help_panel=_FORM, help="What this regular expression matches as a whole: '(yes|no), because .*'"),
]
GrammarText = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="TEXT|@FILE",
        rich_help_panel=_FORM,
        help='What this grammar derives, in Lark (\'start: "yes" | "no"\') or the GBNF of llama.cpp. @FILE reads one.',
    ),
]
SpeculationOff = Annotated[
    bool, typer.Option("--no-speculation", rich_help_panel=_SPEED, help="Plain decoding: the same text, slower.")
]
Budget = Annotated[
    int | None, typer.Option(rich_help_panel=_SPEED, help="Verify at most so many nodes a round, the root included.")
]


def grammar_of(json_object: bool, json_schema: str | None, regex: str | None, grammar: str | None) -> Grammar | None:
    """Return the grammar that the options name, None if they name none."""
    if not json_object and json_schema is None and regex is None and grammar is None:
        return None
    return Grammar(
        json_object=json_object,
        json_schema=_text("--json-schema", json_schema),
        regex=regex,
        grammar=_text("--grammar", grammar),
    )


def speculation_of(off: bool, budget: int | None) -> Speculation | None:
    """Return the drafting options, None if none is given."""
    return Speculation(off=off, budget=budget) if off or budget is not None else None


def bias_of(assignments: list[str] | None) -> dict[int, float]:
    """Read `["42=-100"]` as a dict."""
    bias = {}
    for text in assignments or []:
        token, _, value = text.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {text}: write ID=VALUE, for example --logit-bias 42=-100") from None
    return bias


def _text(option: str, given: str | None) -> str | None:
    """Return the text itself, or that of the file named after an @."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {given}: cannot be read: {error}") from None
