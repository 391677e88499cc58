from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from engine.config import load, parse_assignment
from engine.core.errors import ConfigError, RequestError, TalonError, first_line, printable, shown
from engine.core.params import SamplingParams, Speculation


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\x1b[2Jb", r"'a\x1b[2Jb'"), ("\u202e", r"'\u202e'"), (["a", 1], "['a', 1]"), (None, "None"), ("é", "'é'")],
)
def test_a_value_is_shown_as_python_writes_it(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value", ["a" * 10**6, [0] * 10**6, {"a" * 999: "b" * 999}, 10**5000, ("\x1b" * 10**6,)], ids=range(5)
)
def test_of_a_large_value_a_little_is_shown(value: Any) -> None:
    assert len(shown(value)) <= 400 and shown(value).isprintable()


def test_a_message_is_one_printable_line_that_ends_with_the_fix() -> None:
    told = str(TalonError(f"field={'a' * 10**6}\n\x1b[2J: use b"))
    assert told.isprintable() and len(told) < 2100 and told.startswith("field=a") and told.endswith(": use b")


def test_the_first_line_of_anothers_error_is_printable() -> None:
    assert first_line(ValueError("bad \x1b[2J\nand more")) == r"bad \x1b[2J"
    assert first_line(ValueError()) == "ValueError"


def test_a_text_is_shortened_in_its_middle() -> None:
    assert printable("begin" + "a" * 100 + "end", 30) == "begin" + "a" * 15 + " ... " + "a" * 7 + "end"


LONG = "x\x1b" * 10_000
REFUSED: list[Callable[[], Any]] = [
    SamplingParams(stop=(LONG,)).validate,
    SamplingParams(stop=LONG).validate,  # type: ignore[arg-type]
    SamplingParams(temperature=LONG).validate,  # type: ignore[arg-type]
    SamplingParams(speculation=Speculation(budget=LONG)).validate,  # type: ignore[arg-type]
    SamplingParams(logit_bias=dict.fromkeys(range(9999), 101.0)).validate,
    partial(load, {"method": "pld", LONG: 1}),
    partial(load, {"mode": LONG}),
    partial(load, {"drafter": {"budget": LONG}}),
    partial(parse_assignment, LONG),
]


@pytest.mark.parametrize("refused", REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_parameter_key_or_value_is_repeated_in_part(refused: Callable[[], Any]) -> None:
    with pytest.raises((RequestError, ConfigError)) as caught:
        refused()
    most = 1000 if isinstance(caught.value, ConfigError) else 700
    assert str(caught.value).isprintable() and len(str(caught.value)) < most
