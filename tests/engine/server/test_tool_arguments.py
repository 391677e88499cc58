"""The JSON that a model wrote, as it is read."""

from __future__ import annotations

import json

import pytest

from engine.server.tools.arguments import read_arguments, read_json

NESTED = '{"a": ' + "[" * 150 + "]" * 150 + "}"


@pytest.mark.parametrize("text", ["", "{}", '{"a": [1, 2.5, null, {"b": "c"}]}', NESTED])
def test_arguments_are_read_as_they_are(text: str) -> None:
    assert read_arguments(text) == json.loads(text or "{}")


@pytest.mark.parametrize("levels", [400, 1_000, 100_000])
@pytest.mark.parametrize("closes", [True, False])
def test_a_value_without_end_is_not_read(levels: int, closes: bool) -> None:
    text = "[" * levels + "]" * levels * closes
    with pytest.raises(ValueError, match=r"nests|Expecting"):
        read_json(text)
    assert read_arguments(f'{{"a": {text}}}') is None


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000])
def test_a_number_that_cannot_be_sent_on_is_not_read(number: str) -> None:
    assert read_arguments(f'{{"a": [{number}]}}') is None


@pytest.mark.parametrize("text", ["[]", "1", "null", '"{}"', '{"a": ', "{'a': 1}"])
def test_what_is_no_object_is_no_arguments(text: str) -> None:
    assert read_arguments(text) is None
