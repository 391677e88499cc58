"""Which tensors of a checkpoint a parameter of transformers' model is made of, by transformers' own rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_EXPERT = re.compile(r"(\.experts\.)\d+\.")


def joined_tensors(model: Any, tensors: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, by the name of each parameter, the tensors whose outputs it has, one after the other. A tensor that every
    expert has stands there once, with `*` in the place of the expert's number.

    Parameters that are made of tensors in another way are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters, found = model.state_dict(), dict[str, dict[int, str]]()
    for tensor in tensors:
        name, pattern = rename_source_key(tensor, renamings, converters, model.base_model_prefix, parameters)
        if name not in parameters:
            name, pattern = tensor, None
        if pattern is None:
            found.setdefault(name, {})[0] = tensor
        elif all(isinstance(step, Concatenate | MergeModulelist) for step in of_pattern[pattern].operations):
            part = of_pattern[pattern].source_patterns.index(pattern)
            found.setdefault(name, {})[part] = _EXPERT.sub(r"\1*.", tensor)
    return {name: tuple(parts[at] for at in sorted(parts)) for name, parts in found.items()}
