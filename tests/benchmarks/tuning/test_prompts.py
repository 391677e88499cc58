"""The prompts of a tuning: which are trained on and which are measured, and how many are asked in a time."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.tuning import answering
from benchmarks.tuning.prompts import OPEN_PROMPTS, TuningPrompt, read_tuning_prompts
from engine.files.prompt_file import read_chats
from engine.weights.tokenizer import load_tokenizer
from tests.benchmarks.tuning.conftest import PROMPTS


def test_a_chat_form_that_names_the_day_is_the_same_after_midnight(walker: str, prompts: Path) -> None:
    tokenizer = load_tokenizer(walker)
    tokenizer.chat_template = "{{ strftime_now('w%-d w%-m') }} " + tokenizer.chat_template
    one = read_tuning_prompts(prompts, tokenizer, 14).trained[0]
    assert one.tokens[:2] == [1, 1]  # of the first of January, whatever day it is


def test_an_answer_is_of_the_prompt_in_its_chat_form() -> None:
    one, other = TuningPrompt("w5", [1, 5, 2]), TuningPrompt("w5", [5])
    assert one.asked != other.asked and one.digest == other.digest


def test_prompts_to_measure_with_are_never_trained_on_whatever_the_order_of_the_file(
    walker: str, prompts: Path
) -> None:
    tokenizer = load_tokenizer(walker)
    found = read_tuning_prompts(prompts, tokenizer, 12)
    assert (len(found.trained), len(found.measured)) == (PROMPTS - 8, 8)
    assert not {tuple(one.tokens) for one in found.trained} & {tuple(one.tokens) for one in found.measured}
    assert {len(one.tokens) for one in found.trained} == {5}
    lines = prompts.read_text().splitlines(True)
    prompts.write_text("".join([*reversed(lines), *lines[:9]]))
    assert read_tuning_prompts(prompts, tokenizer, 12) == found
    prompts.write_text("".join(lines[1:]))
    assert read_tuning_prompts(prompts, tokenizer, 12).digest != found.digest


def test_no_prompt_is_asked_when_the_time_is_over_but_for_the_few_that_training_needs() -> None:
    prompts = [TuningPrompt(str(number), [number]) for number in range(50)]
    assert [*answering._in_time(prompts, 0, 20, math.inf)] == [(one.asked, one.tokens) for one in prompts]
    assert len([*answering._in_time(prompts, 5, 20, -math.inf)]) == 15


def test_the_open_prompts_are_chats_tools_and_questions_and_take_little_room() -> None:
    rows = [*read_chats(OPEN_PROMPTS, "prompts")]
    assert len({row.name for row in rows}) == len(rows) == 1378 and OPEN_PROMPTS.stat().st_size < 300_000
    assert sum(bool(row.tools) for row in rows) >= 100 and sum(len(row.messages or ()) > 2 for row in rows) >= 100
    assert not [row for row in rows if "\nOptions:" in row.name]  # of sets of questions whose licences share alike
