"""What published chat templates refuse, as the first part of a template of ours."""

from __future__ import annotations

_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
_REST = "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
GUARDS = {
    "Qwen 3.5": (
        "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('No user query found') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    ),
    "Mistral": (
        f"{_REST}{{% for m in rest | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}}"
        f"{_ALTERNATE}{{% endfor %}}{{% for m in rest %}}{{% if m.role not in ('user', 'assistant', 'tool') %}}"
        "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
    ),
    "Gemma 3": f"{_REST}{{% for m in rest %}}{_ALTERNATE}{{% endfor %}}",
    "Gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        f"{{% for m in messages %}}{_ALTERNATE}{{% endfor %}}"
    ),
}  # fmt: skip
