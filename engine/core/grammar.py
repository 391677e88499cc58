"""Grammar: what a request's answer must look like, as the caller specifies it. `engine.sampling.matcher` enforces it.

The library is llguidance: no dependencies, nothing compiled ahead, limits of its own against hostile grammars, and
errors that stay with the request. It is imported only when a grammar is used; the extra `grammar` installs it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec

from engine.core.errors import HALF_A_CHARACTER, RequestError, is_text, shown
from engine.core.grammar_depth import MOST_LEVELS, MOST_RULES, chained_rules, schema_levels, schemas_within

JSON_WHITESPACE = {"whitespace_pattern": r"( |\n[ \t]{0,64})?"}
"""Whitespace in JSON: what `json.dumps` writes, indented or not. Without a bound a model may never stop."""
ONE_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""An addition to a schema: JSON is as `json.dumps` writes it on one line."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose keys are names, and whose values are schemas."""
SCHEMA_VALUES = ("const", "enum", "default", "examples")
"""Keywords of a schema that hold values."""
_KEPT = 32  # texts that are known to be shallow
_LARGEST = 1 << 20  # characters; longer ones cost seconds before the library refuses them


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of four ways to specify it.

    json_object: any JSON object. json_schema: a JSON schema, as a dict or as JSON text. regex: a regular expression in
    the syntax of Rust's `regex` crate that the whole answer matches. grammar: a context-free grammar in llguidance's
    variant of Lark, or in the GBNF of llama.cpp, which is recognised by its `::=`.
    """

    json_object: bool = False
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def validate(self) -> Grammar:
        """Return it with the schema as text. Raises RequestError naming the field that is wrong.

        `engine.sampling.matcher.check` finds out whether the library accepts it.
        """
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise RequestError(f"grammar: {found} given; give one of json_object, json_schema, regex and grammar")
        (field,) = given
        value: Any = _schema_text(self.json_schema) if field == "json_schema" else getattr(self, field)
        if field == "json_object":
            if value is not True:
                raise RequestError(f"grammar.json_object={shown(value)}: use True, or leave it out")
        elif not isinstance(value, str) or not value.strip():
            raise RequestError(f"grammar.{field}={shown(value)}: give a text that is not empty")
        elif len(value) > _LARGEST:
            raise RequestError(f"grammar.{field}: has {len(value)} characters; {_LARGEST} are the most")
        elif not is_text(value):
            raise RequestError(f"grammar.{field}: {HALF_A_CHARACTER}")
        elif field in ("json_schema", "grammar"):
            _check_depth(field, value)
        return Grammar(**{field: value})


@functools.lru_cache(maxsize=_KEPT)
def _check_depth(field: str, text: str) -> None:
    """Raise RequestError for a schema or a grammar that would fill the library's stack. One is validated where it is
    made, and again with the parameters that hold it.
    """
    if field == "grammar" and chained_rules(text) > MOST_RULES:
        raise RequestError(f"grammar.grammar: over {MOST_RULES} rules refer to one another in turn; join some")
    schemas = [json.loads(text)] if field == "json_schema" else schemas_within(text)
    if any(schema_levels(schema) > MOST_LEVELS for schema in schemas):
        raise RequestError(f"grammar.{field}: references lead over {MOST_LEVELS} levels of the schema; join some parts")


def _schema_text(schema: Any) -> str:
    """Return the schema as JSON text. The order of its properties is kept, since the answer follows it."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if not isinstance(json.loads(text), dict):
            raise RequestError('grammar.json_schema: is no JSON object; give one such as {"type": "object"}')
    except (TypeError, ValueError) as error:
        raise RequestError(f"grammar.json_schema: is no JSON: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise RequestError("grammar.json_schema: is nested too deeply; use $ref") from None
    return text
