"""llama.cpp's /infill, as editors ask it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.infill.render import InfillRenderer
from engine.server.infill.schema import InfillRequest
from engine.text.fill_in import FillIn
from engine.wire.messages import PromptProgress
from tests.conftest import tiny_tokenizer
from tests.engine.server.figures import logged
from tests.engine.server.process import ServerProcess
from tests.engine.server.tool_model import FILL_IN

VIM: dict[str, Any] = {
    "model": None,  # editors name none
    "id_slot": 0,
    "input_prefix": "def f(",
    "input_suffix": "): pass\n",
    "input_extra": [{"text": "x = 1", "time": 12, "filename": "a.py"}],
    "prompt": "a, ",
    "n_predict": 12,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "seed": 5,
}


def asked(**more: Any) -> dict[str, Any]:
    return VIM | {"ignore_eos": True} | more


def infill(server: ServerProcess, **more: Any) -> dict[str, Any]:
    return server.ask("/infill", **asked(**more))


def test_an_editor_gets_the_text_of_a_completion_of_the_same_prompt_and_its_figures(tool_server: ServerProcess) -> None:
    found = infill(tool_server, return_tokens=True)
    assert (found["stop"], found["stop_type"], found["truncated"]) == (True, "limit", False)
    assert (found["tokens_predicted"], found["timings"]["predicted_n"], len(found["tokens"])) == (12, 12, 12)
    assert found["generation_settings"]["n_ctx"] == 4096 and found["generation_settings"]["seed"] == 5
    assert found["timings"]["predicted_ms"] > 0 and found["timings"]["prompt_ms"] > 0
    spelled = "\n\n--- snippet ---\n\nx = 1" + FILL_IN[0] + "def f(a, " + FILL_IN[1] + "): pass\n" + FILL_IN[2]
    assert found["prompt"] == spelled
    same = {name: VIM[name] for name in ("top_k", "top_p", "seed")} | {"temperature": 0.8, "min_p": 0.05}
    choice = tool_server.ask("/v1/completions", prompt=spelled, max_tokens=12, ignore_eos=True, **same)["choices"][0]
    assert choice["text"] == found["content"] != ""
    for name in ("n_indent", "samplers", "t_max_predict_ms"):
        logged(tool_server, f"ignored field: {name}:")


def test_the_parts_of_a_stream_add_up_and_the_last_one_has_the_figures(tool_server: ServerProcess) -> None:
    parts = tool_server.events("/infill", **asked())
    assert "".join(part["content"] for part in parts) == infill(tool_server)["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["tokens_predicted"] == parts[-2]["tokens_predicted"] == 12


def test_a_long_prompt_says_how_far_it_is_where_that_is_wanted() -> None:
    def renderer(**more: Any) -> InfillRenderer:
        """A renderer that shows no text."""
        return InfillRenderer("tiny", InfillRequest(**VIM, **more), None, None, 4096)  # type: ignore[arg-type]

    read = PromptProgress(request=1, read=64, total=200, cached=16, elapsed_us=5000, left_us=9000)
    told = [renderer(return_progress=wanted).progress(0, read) for wanted in (True, False)]
    shown = {"total": 200, "cache": 16, "processed": 64, "time_ms": 5, "left_ms": 9}
    assert [chunk["prompt_progress"] for chunk in told[0]] == [shown] and told[1] == []


def test_only_the_fields_that_are_wanted_come_back(tool_server: ServerProcess) -> None:
    wanted = ["content", "timings/predicted_n", "generation_settings/n_ctx", "nothing/there", "tokens_cached"]
    found = infill(tool_server, response_fields=wanted)
    assert {*found} == {"content", "predicted_n", "n_ctx", "tokens_cached"} and found["n_ctx"] == 4096


def test_a_request_for_no_token_shows_none_and_leaves_its_prompt_in_the_cache(tool_server: ServerProcess) -> None:
    more = {"input_prefix": "class Warm:\n" + "    x = 1\n" * 20}
    found = infill(tool_server, n_predict=0, **more)
    assert (found["content"], found["tokens_predicted"], found["stop_type"]) == ("", 0, "limit")
    (last,) = tool_server.events("/infill", **asked(n_predict=0, **more))
    assert (last["content"], last["stop"]) == ("", True) and last["tokens_cached"] > 150


def test_a_text_that_ends_the_answer_is_named(tool_server: ServerProcess) -> None:
    text = infill(tool_server)["content"]
    stop = next(letter for letter in text[3:] if letter.isascii())  # no part of a character
    found = infill(tool_server, stop=["\0", stop])
    assert (found["stop_type"], found["stopping_word"]) == ("word", stop)
    assert found["content"] == text.partition(stop)[0]


def test_an_empty_name_is_the_model_that_is_served(tool_server: ServerProcess) -> None:
    assert infill(tool_server, model="")["model"] == "tiny"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_prefix": "x" * 5000}, "input_prefix"),
        ({"n_probs": 3}, "n_probs"),
        ({"model": "another"}, "model"),
        ({"mirostat": 1}, "mirostat"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(tool_server: ServerProcess, more: dict[str, Any], named: str) -> None:
    answer = tool_server.post("/infill", **asked(**more))
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == named


def test_a_model_without_tokens_for_filling_in_says_so(server: ServerProcess) -> None:
    error = server.post("/infill", **asked()).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", "input_suffix")


def test_other_files_stand_before_the_prompt_as_in_a_repository_and_the_last_ones_fit() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([*FILL_IN, "<|repo_name|>", "<|file_sep|>"], special_tokens=True)
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    files = [("a.py", "a = 1\n"), ("b.py", "b = 2\n")]
    texts = ["<|repo_name|>myproject\n", "<|file_sep|>a.py\na = 1\n", "<|file_sep|>b.py\nb = 2\n"]
    last = "<|file_sep|>filename\n"

    def read(most: int) -> str:
        return str(tokenizer.decode(fill_in.before(files, most), clean_up_tokenization_spaces=False))

    whole = len(fill_in.before(files, 1000))
    assert read(whole) == "".join(texts) + last
    assert read(whole - 1) == texts[0] + texts[2] + last
    assert read(20) == ""
