"""A JSON schema that a client sends: what of it a grammar follows, and whether a finished value follows all of it.

The library is jsonschema-rs: it bounds the work of a regular expression, which a client chooses, and needs no others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from engine.core.errors import printable
from engine.sampling.matcher import without_annotations
from engine.sampling.relaxed_schema import relaxed
from engine.server.tools.comparison_cost import steps_of

_KEPT = 64  # validators
_MOST_KEPT = 32_768  # characters of a schema whose validator is remembered
_MOST_NAMED = 4_000_000  # steps times characters of a value: each error that the library names holds the value
_NOT_COMPARED = "not compared: the schema is too large, refers elsewhere or cannot be read"
_MOST_PATH = 200  # characters: names in it are the client's


@dataclass(frozen=True)
class AskedSchema:
    """A schema that a client has sent, and the part that a grammar follows.

    path: what the client calls it. whole: as the client sent it. followed: what a grammar follows, which is all of it
    but the keywords at the paths `left_out`. Names in paths are the client's, and the log may not hold them: `noted`
    are the same keywords without them.
    """

    path: str
    whole: dict[str, Any]
    followed: dict[str, Any]
    left_out: Sequence[str] = ()
    noted: Sequence[str] = ()

    @classmethod
    def of(cls, path: str, schema: dict[str, Any], strict: bool | None) -> AskedSchema:
        """Leave out what a grammar cannot follow, unless the client wants the schema followed strictly. Takes
        milliseconds for a schema that is new.
        """
        if strict:
            return cls(path, schema, json.loads(without_annotations(json.dumps(schema))))
        followed, places = relaxed(schema)
        left_out = [printable(path + place, _MOST_PATH) for place in places]
        keywords = dict.fromkeys(place.rpartition(".")[2] for place in places if place.startswith("."))
        return cls(path, schema, followed, left_out, [f"{_holder(path)}: {keyword}" for keyword in keywords])

    def differences(self, value: Any) -> list[str]:
        """Return the keywords that a value does not follow, without the client's names, or why none is named. Raises
        nothing: the answer is complete by then.
        """
        if not self.left_out:
            return []
        holder = _holder(self.path)
        try:
            if (steps := steps_of(self.whole, value)) is None:
                return [f"{holder}: {_NOT_COMPARED}"]
            text = json.dumps(self.whole)
            validator = (_remembered if len(text) <= _MOST_KEPT else _validator)(text)
            if validator.is_valid(value):
                return []
            if steps * len(json.dumps(value)) > _MOST_NAMED:
                return [f"{holder}: not followed"]
            keywords = dict.fromkeys(error.kind.name for error in validator.iter_errors(value))
        except Exception:  # the error's words may be the schema's
            return [f"{holder}: {_NOT_COMPARED}"]
        return [f"{holder}: {keyword}" for keyword in keywords]


def _holder(path: str) -> str:
    """Return what a schema belongs to: a tool by its number, or the answer."""
    tool, number, _ = path.rpartition("]")
    return tool + number or path


def _validator(schema: str) -> Any:
    """Return a validator of the schema. It fetches nothing."""
    return jsonschema_rs.validator_for(json.loads(schema), retriever=_refuse)


_remembered = functools.lru_cache(maxsize=_KEPT)(_validator)


def _refuse(uri: str) -> Any:
    raise ValueError("refers to another document")
