"""Prompts for those who have named none: what people ask, code and text, with something to copy from and without."""

from __future__ import annotations

import json
from pathlib import Path

SAMPLE_PROMPTS = (
    "Rename the variable `n` to `count` in this function and add a docstring. Answer with the whole function.\n\n"
    "def mean(values):\n    n = 0\n    total = 0.0\n    for value in values:\n        total += value\n        n += 1\n"
    "    if n == 0:\n        raise ValueError('no values')\n    return total / n\n",
    "Write a Python function that merges two sorted lists into one sorted list, and a test of it.",
    "A train travels 60 km in the first hour and 80 km in each of the next two hours. How far does it travel in all, "
    "and what is its mean speed? Explain step by step.",
    "Summarise in two sentences: Tides are the rise and fall of sea levels caused by the combined effects of the "
    "gravitational forces exerted by the Moon and the Sun and the rotation of the Earth. The times and amplitudes of "
    "tides at a place are influenced by the alignment of the Sun and Moon, by the pattern of tides in the deep ocean, "
    "by the shape of the coastline and near-shore depths. Some shorelines have two nearly equal high tides a day, "
    "others only one, and some have two uneven tides.",
    "I have an interview next week and I am nervous. What should I do to prepare?",
    'Give these as a JSON list of objects with "name" and "price": apples at 2.50, pears at 3.10, plums at 4.00, '
    "grapes at 5.25.",
)


def write_sample_prompts(file: Path) -> Path:
    """Write the prompts as a question file."""
    lines = [json.dumps({"question_id": str(number), "prompt": one}) for number, one in enumerate(SAMPLE_PROMPTS, 1)]
    file.write_text("\n".join(lines) + "\n", encoding="utf8")
    return file
