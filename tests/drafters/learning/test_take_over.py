"""A head that appears while the engine serves: it drafts from then on, for its owner alone, and no text changes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, SamplingParams
from engine.config import load
from engine.core.params import Speculation
from engine.files.kept_texts import shelf_of
from engine.files.lessons import LessonOutcome
from engine.weights.installed_head import METHOD, learned_heads
from tests.benchmarks.tuning.conftest import text_from
from tests.drafters.learning.conftest import ANN, Lessons

TOKENS = 24


@pytest.fixture
def head(first_lesson: tuple[Lessons, LessonOutcome]) -> Path:
    """Return a head that was learned."""
    lessons, outcome = first_lesson
    assert outcome.installed
    return learned_heads(lessons.learned.heads)[ANN]


def put(head: Path, heads: Path, owner: str) -> None:
    """Install a copy of a head for an owner."""
    place = heads / shelf_of(owner)
    shutil.copytree(head, place / f".{METHOD}-copy")
    (place / METHOD).symlink_to(f".{METHOD}-copy")


async def ask(engine: Engine, start: int, owner: str | None) -> tuple[list[int], int]:
    """Return the answer to a walk from that place, and how many of its tokens a head proposed."""
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, speculation=Speculation(owner=owner))
    result = await engine.generate(text_from(start, 30)[:5], sampling)
    return result.token_ids, result.sources.count("head")


@pytest.mark.parametrize(("mode", "transport"), [("sequential", "inproc"), ("async", "ipc")])
async def test_no_text_changes_while_a_head_takes_over(
    head: Path, walker: str, tmp_path: Path, mode: str, transport: str
) -> None:
    heads, starts = tmp_path / "heads", [1, 81, 161]
    enough = len(starts) * TOKENS / 4 if mode == "sequential" else 4  # on a busy machine drafts ahead come late
    settings: dict[str, Any] = {"model": walker, "verifier.threads": 1, "verifier.cut": False}
    learning = {"method": "hybrid", "mode": mode, "drafter.head": METHOD, "drafter.learned": str(heads)}
    learning |= {"transport": transport, "drafter.memories": ["pld"]}  # which finds nothing in a walk
    async with await Engine.start(load({}, settings | {"method": "none", "transport": "inproc"})) as engine:
        plain = [(await ask(engine, start, None))[0] for start in starts]
    async with await Engine.start(load({}, settings | learning)) as engine:

        async def all_equal() -> dict[str | None, int]:
            owners = ["ann", "ben", None]
            asked = [(start, owner) for start in starts for owner in owners]
            answers = await asyncio.gather(*(ask(engine, *one) for one in asked))
            assert [text for text, _ in answers] == [text for text in plain for _ in owners]
            return {one: sum(n for (_, n), (_, of) in zip(answers, asked, strict=True) if of == one) for one in owners}

        assert await all_equal() == {"ann": 0, "ben": 0, None: 0}
        installing = asyncio.create_task(asyncio.to_thread(put, head, heads, "ann"))
        await all_equal()  # requests are under way while it appears
        await installing
        for _ in range(100):
            if (found := await all_equal())["ann"] > enough:
                break
            await asyncio.sleep(0.1)
        assert found["ann"] > enough
        assert (found["ben"], found[None]) == (0, 0)
        (heads / shelf_of("ann") / METHOD).unlink()
        for _ in range(100):
            if not (found := await all_equal())["ann"]:
                break
            await asyncio.sleep(0.1)
        assert found == {"ann": 0, "ben": 0, None: 0}


async def test_a_damaged_head_costs_a_line_alone(head: Path, walker: str, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    put(head, heads, "ann")
    weights = heads / shelf_of("ann") / METHOD / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    learning = {"method": "hybrid", "drafter.head": METHOD, "drafter.learned": str(heads), "transport": "inproc"}
    async with await Engine.start(load({"model": walker}, learning)) as engine:
        assert len((await ask(engine, 3, "ann"))[0]) == TOKENS
