from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Write a file of three questions."""
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": "test", "turns": [f"count {i} and {i} and {i}"]} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
