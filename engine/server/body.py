"""What all bodies of requests share: unknown fields are refused by name, and those that ask for nothing are dropped."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from engine.core.errors import HALF_A_CHARACTER, is_text

_ABSENT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_calls": ([],),
    "annotations": ([],),
    "functions": ([],),
    "mcp_servers": ([],),
    "function_call": ("none",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "include_obfuscation": (False,),
    "logprobs": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
}
"""Fields, and their values that ask for nothing."""
_PRESENT = BeforeValidator(lambda _: True, json_schema_input_type=Any)
SentBack = Annotated[bool, _PRESENT]
"""A field of an earlier answer, which asks for nothing. Only its presence is kept, not its value."""
Ignored = Annotated[bool, _PRESENT, "ignored"]
"""A field that asks for what does not exist here: it changes no answer, and the answer and the log name it."""


@lru_cache
def _numbers(body: type[BaseModel]) -> frozenset[str]:
    """Return the fields that hold numbers."""
    kinds = {name: {field.annotation, *get_args(field.annotation)} for name, field in body.model_fields.items()}
    return frozenset(name for name, kind in kinds.items() if kind & {int, float})


@lru_cache
def _ignored(body: type[BaseModel]) -> frozenset[str]:
    """Return the fields that are `Ignored`."""
    return frozenset(name for name, field in body.model_fields.items() if "ignored" in field.metadata)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        """Drop null, which clients send for fields they leave open, and empty lists of tools."""
        if not isinstance(values, dict):
            return values
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        switches = {name for name, field in cls.model_fields.items() if field.annotation is bool}
        said = {key for key in values.keys() & switches if isinstance(values[key], bool)}  # false has a meaning here
        idle = {key for key in values.keys() - said if any(_same(values[key], one) for one in _ABSENT.get(key, ()))}
        idle |= {key for key in values.keys() - needed if values[key] is None}
        asked = {key: value for key, value in values.items() if key not in idle}
        for key in _numbers(cls) & asked.keys():
            if isinstance(asked[key], bool):  # pydantic and Python take true for 1
                raise ValueError(f"{key}: should be a number; {str(asked[key]).lower()} is none")
        return asked

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuse a text with half of a character, which JSON can hold. JSON schemas are left to the grammar's library,
        which refuses it too.
        """
        texts = value if isinstance(value, list) else [value]
        if not all(is_text(text) for text in texts if isinstance(text, str)):
            raise ValueError(HALF_A_CHARACTER)
        return value

    @property
    def ignored(self) -> list[str]:
        """The fields sent, here and in the parts, that have no effect."""
        names = {name for name in _ignored(type(self)) if getattr(self, name)}
        for value in (getattr(self, name) for name in self.model_fields_set):
            parts = value if isinstance(value, list) else [value]
            names |= {name for part in parts if isinstance(part, Body) for name in part.ignored}
        return sorted(names)
