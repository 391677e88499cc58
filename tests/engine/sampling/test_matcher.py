from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, IPvAnyAddress, SecretStr

from engine.core.errors import RequestError, RequestFailed
from engine.core.grammar import Grammar
from engine.core.tree import TokenTree
from engine.sampling.matcher import Matcher, Matchers, check
from tests.conftest import VOCABULARY, tiny_tokenizer

END = 0
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}}, "required": ["a"]}
GRAMMARS = [
    Grammar(json_object=True),
    Grammar(json_schema=json.dumps(SCHEMA)),
    Grammar(regex=r"(ab|a)+c?[0-9]{0,3}"),
    Grammar(grammar='start: "f(" arg ")"\narg: NUMBER | "f(" arg ")"\nNUMBER: /[0-9]+/'),
    Grammar(grammar='root ::= ("cat " | "dog ")+ "mat"'),
]


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(tiny_tokenizer, VOCABULARY, [END])


def matcher_of(matchers: Matchers, grammar: Grammar, answer: str = "") -> Matcher:
    return matchers.begin(grammar.validate(), tokens_of(answer)).result(30)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text)["input_ids"]
    return ids


@pytest.mark.parametrize("grammar", GRAMMARS, ids=repr)
def test_asking_for_one_token_and_for_the_whole_vocabulary_is_the_same_question(
    matchers: Matchers, grammar: Grammar
) -> None:
    rng = random.Random(5)
    matcher = matcher_of(matchers, grammar)
    steps = 0
    while not matcher.ended and steps < 40:
        allowed = matcher.allowed()
        allowed[END] = False  # the sampler's
        assert [matcher.allows(token) for token in range(1, VOCABULARY)] == allowed[1:].tolist()
        if not allowed.any():
            break
        matcher.accept(rng.choice(np.flatnonzero(allowed).tolist()))
        steps += 1
    assert steps > 2


def test_a_matcher_goes_on_where_an_earlier_one_stopped(matchers: Matchers) -> None:
    grammar, text = Grammar(json_schema=SCHEMA), '{"a": "yy", "b": 12}'
    for cut in range(len(text)):
        followed = matcher_of(matchers, grammar, text[:cut])
        for token in tokens_of(text[cut:]):
            assert followed.allows(token)
            assert not followed.ended
            followed.accept(token)
        assert followed.ended and followed.complete


def test_an_answer_may_end_where_it_is_complete_and_leaving_the_grammar_ends_the_request_with_a_reason(
    matchers: Matchers,
) -> None:
    matcher = matcher_of(matchers, Grammar(regex="[0-9]+x?"))
    assert not matcher.complete
    matcher.accept(*tokens_of("4"))
    assert matcher.complete and not matcher.ended, "an answer may end or go on"
    with pytest.raises(RequestFailed, match="the grammar could not be followed"):
        matcher.accept(*tokens_of("z"))


def test_of_a_draft_the_nodes_are_kept_that_the_grammar_lets_come(matchers: Matchers) -> None:
    matcher = matcher_of(matchers, Grammar(regex="(abc|axy)d*"))
    a, b, c, d, x, z = tokens_of("abcdxz")
    tree = TokenTree.from_lists(
        [9, a, b, x, c, z, d, z], [-1, 0, 1, 1, 2, 2, 4, 0], [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    )
    assert matcher.admitted(tree).tolist() == [True, True, True, True, True, False, True, False]
    assert matcher.allows(a) and not matcher.allows(b)  # it has not moved
    assert matcher.admitted(TokenTree.root_only(9)).tolist() == [True]


def test_what_little_else_can_follow_is_foreseen_in_the_style_the_answer_has(matchers: Matchers) -> None:
    schema = Grammar(json_schema=SCHEMA | {"additionalProperties": False})
    for answer, following in (
        ("", '{"a": "'),
        ('{"a":', ' "'),
        ('{"a":"yy"', ""),  # it may end or go on
        ('{"a":"yy",', '"b":'),
        ('{"a": "yy",', ' "b": '),
    ):
        foreseen = matcher_of(matchers, schema, answer).foreseen()
        assert tiny_tokenizer().decode(foreseen) == following, answer
    assert tiny_tokenizer().decode(matcher_of(matchers, Grammar(regex="one (two|three)")).foreseen()) == "one t"


def fields(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def some(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


TEXT, WHOLE = {"type": "string", "maxLength": 9}, {"type": "integer", "minimum": -40, "maximum": 120}
DATE = {"type": "string", "pattern": r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"}
SHAPES = [fields(kind={"const": "circle"}, radius=WHOLE), fields(kind={"const": "box"}, width=WHOLE, height=WHOLE)]
LEAVES = {"leaf": fields(label=TEXT), "node": fields(label=TEXT, children=some({"$ref": "#/$defs/leaf"}, 3))}


@pytest.mark.parametrize(
    "schema",
    [
        fields(buyer=fields(name=TEXT, since=DATE), state={"enum": ["open", "paid"]}, paid={"type": "boolean"}),
        fields(readings=some(fields(at=DATE, celsius={"type": "number"}), 3), rows=some(some(WHOLE, 3), 3)),
        fields(shapes=some({"anyOf": SHAPES}, 3)),
        {"$defs": LEAVES, "$ref": "#/$defs/node"},
    ],
    ids=["enumeration", "arrays", "alternatives", "definitions"],
)
def test_whatever_a_nested_schema_lets_come_is_valid_by_another_library(
    matchers: Matchers, schema: dict[str, Any]
) -> None:
    for seed in range(5):
        rng, matcher, answer = random.Random(seed), matcher_of(matchers, Grammar(json_schema=schema)), list[int]()
        while not matcher.ended and len(answer) < 2000:
            tokens = np.flatnonzero(matcher.allowed())
            answer.append(rng.choice(tokens[tokens != END].tolist()))
            matcher.accept(answer[-1])
        jsonschema.validate(json.loads(tiny_tokenizer().decode(answer)), schema)


def test_json_between_its_parts_has_the_white_space_people_write_and_not_more(matchers: Matchers) -> None:
    value = {"a": "x", "b": 7}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert matcher_of(matchers, Grammar(json_schema=SCHEMA), text).ended
    for wrong in ("{\n\n", '{"a": "xx"'):
        with pytest.raises(RequestFailed):
            matcher_of(matchers, Grammar(json_schema=SCHEMA), wrong)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "grammar: none given; give one of"),
        ({"json_object": True, "regex": "a"}, "grammar: json_object, regex given; give one of"),
        ({"json_object": 1}, r"grammar\.json_object=1: use True"),
        ({"json_schema": "{"}, r"grammar\.json_schema: is no JSON: "),
        ({"json_schema": "[1]"}, r"grammar\.json_schema: is no JSON object"),
        ({"json_schema": {"type": object}}, r"grammar\.json_schema: is no JSON: "),
        ({"regex": " "}, r"grammar\.regex=' ': give a text that is not empty"),
        ({"regex": 5}, r"grammar\.regex=5: give a text"),
        ({"grammar": "x" * (1 << 21)}, r"grammar\.grammar: has 2097152 characters"),
    ],
)
def test_a_grammar_that_says_nothing_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        Grammar(**given).validate()


class Everything(BaseModel):
    """Types that pydantic writes with formats of its own."""

    path: Path
    secret: SecretStr
    code: bytes
    address: IPvAnyAddress
    when: datetime.datetime


@pytest.mark.parametrize(
    "schema",
    [
        Everything.model_json_schema(),
        {"type": "object", "properties": {"format": {"type": "string", "format": "no such"}}},
        {"type": "array", "prefixItems": [{"anyOf": [{"type": ["string", "null"], "format": "int32"}]}]},
        {"type": "object", "properties": {"properties": {"type": "string", "format": "int32"}}},
        {"$ref": "#/shared/thing", "shared": {"thing": {"type": "string", "format": "regex"}}},
        {"type": "string", "format": ""},
    ],
)
def test_a_format_that_nobody_knows_says_nothing(schema: dict[str, Any]) -> None:
    check(Grammar(json_schema=schema).validate())


def test_a_format_that_the_library_knows_and_a_value_that_looks_like_one_are_kept(matchers: Matchers) -> None:
    date, path, value = {"type": "string", "format": "date"}, {"type": "string", "format": "path"}, {"format": "path"}
    matcher = matcher_of(matchers, Grammar(json_schema={"type": "array", "prefixItems": [date, path]}), '["')
    assert not matcher.allows(tokens_of("x")[0]) and matcher.allows(tokens_of("2")[0])
    schema = {"type": "array", "prefixItems": [{"const": value}, path]}
    assert matcher_of(matchers, Grammar(json_schema=schema), '[{"format": "path"}, "a"').allows(tokens_of("]")[0])


@pytest.mark.parametrize("fewer", [1, 200])
def test_a_tokenizer_with_more_tokens_than_the_model_has_works_with_grammars(fewer: int) -> None:
    """The last tokens are characters beyond ASCII."""
    matchers = Matchers(tiny_tokenizer, VOCABULARY - fewer, [END, VOCABULARY])
    letters = [token for token in tokens_of("!abc") if token < VOCABULARY - fewer]
    matcher = matchers.begin(Grammar(regex="[!abc]+").validate(), []).result(30)
    assert np.flatnonzero(matcher.allowed()).tolist() == sorted(letters)
    beyond = matchers.begin(Grammar(regex="!~zzzz").validate(), []).result(30)
    assert max(beyond.foreseen()) < VOCABULARY - fewer
    matchers.close()


NESTED: dict[str, Any] = {}
for _ in range(400):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(json_schema={"type": "no such type"}),
        Grammar(json_schema={"$ref": "#/$defs/missing"}),
        Grammar(json_schema={"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        Grammar(json_schema=json.dumps(NESTED)),
        Grammar(regex="(" * 10_000 + "a" + ")" * 10_000),
        Grammar(regex="a(b"),
        Grammar(grammar="start: missing"),
        Grammar(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000),
        Grammar(grammar='root ::= "a" missing'),
        Grammar(grammar='root ::= "a'),
        Grammar(grammar="no grammar at all"),
    ],
    ids=range(11),
)
def test_what_the_library_cannot_take_is_refused_in_one_line_before_anything_starts(grammar: Grammar) -> None:
    with pytest.raises(RequestError, match=r"^grammar\.(json_schema|regex|grammar): .") as told:
        check(grammar.validate())
    assert "\n" not in str(told.value) and len(str(told.value)) < 400
    assert "oneOf" not in str(grammar.json_schema) or str(told.value).endswith("; use anyOf")


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r'pip install "talon-decoding\[grammar\]"'):
        check(Grammar(regex="never seen before").validate())
