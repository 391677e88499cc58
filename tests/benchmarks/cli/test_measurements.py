"""What the commands that measure, check and index leave behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.kernels.gemm.int8.dots import instruction_sets
from tests.command import talon
from tests.conftest import save_tiny_llama
from tests.engine.weights.tiny_gguf import write_gguf


@pytest.fixture
def questions(questions: Path) -> str:
    """Its path as a command is given it."""
    return str(questions)


def test_a_wrong_name_leaves_the_rows_of_an_earlier_run(questions: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("rows\n")
    done = talon("bench", "--questions", questions, "--methods", "pld,pldd", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert done.stderr.startswith("talon: method='pldd'")
    assert (tmp_path / "results.jsonl").read_text() == "rows\n"


@pytest.mark.parametrize("line", ['{"text": null}', '{"text": "half \\ud800"}'])
@pytest.mark.parametrize("kind", [[], ["--dense"]])
def test_a_corpus_line_without_a_text_is_named(tiny: str, tmp_path: Path, line: str, kind: list[str]) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "sound"}\n\n' + line + "\n")
    done = talon("index", "build", "--tokenizer", tiny, "--input", str(file), "--out", str(tmp_path / "index"), *kind)
    assert done.exit_code == 2
    told = [line for line in done.stderr.splitlines() if line.startswith("talon: ")]
    assert len(told) == 1 and f"input={file}: line 3: " in told[0]


def test_a_quick_bench_needs_no_questions_and_ends_with_a_line_to_paste(tiny: str, tmp_path: Path) -> None:
    model = "--set", f"model={tiny}", "--set", "transport=inproc"
    done = talon("bench", "--quick", "--minutes", "0.01", "--max-tokens", "8", "--out", str(tmp_path), *model)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"talon serve --set model={tiny} --set transport=inproc --method ")
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 6
    assert "six prompts of its own" in done.stderr and "--questions takes yours" in done.stderr


@pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
def test_a_quick_bench_of_a_model_in_blocks_tries_both_kinds_of_activations(
    questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, describes_here: None
) -> None:
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, GGMLQuantizationType.Q4_1)
    options = ["--questions", questions, "--minutes", "0.02", "--max-tokens", "8", "--out", str(tmp_path / "out")]
    done = talon("bench", "--quick", *options, "--set", f"model={file}", "--set", "transport=inproc")
    assert done.exit_code == 0, done.stderr
    assert "activations=auto is bfloat16 here: " in done.stderr and "add --set activations=int8" in done.stderr
    assert "activations" not in done.stdout.splitlines()[-1]
    kinds = [tmp_path / "out" / name / "results.jsonl" for name in ("", "int8")]
    assert [json.loads(kind.read_text().splitlines()[0])["activations"] for kind in kinds] == ["bfloat16", "int8"]


def test_bench_writes_a_row_per_question_and_method(tiny: str, questions: str, tmp_path: Path) -> None:
    done = talon(
        "bench", "--questions", questions, "--methods", "none,pld,suffix,hf", "--limit", "2", "--max-tokens", "12",
        "--out", str(tmp_path), "--set", f"model={tiny}", "--set", "transport=inproc",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {row["method"] for row in rows} == {"none", "pld", "suffix", "hf"}
    assert all(row["output_equal"] for row in rows)
    assert set(rows[0]) == {
        "suite", "question_id", "method", "temperature", "repeat", "tokens", "seconds", "rounds",
        "mean_accepted_tokens", "time_to_first_token_s", "verifier_busy", "draft_hit_rate", "output_equal", "loops",
        "round_ms_p50", "round_ms_p95", "verify_ms", "draft_ms", "nodes", "accepted", "tie",
        "token_ms_p50", "token_ms_p95", "other_ms", "depth", "peak_memory_mb",
        "exact", "inexact", "activations", "weights", "difference", "turn", "prompt_tokens", "cached_tokens",
    }  # fmt: skip
    assert {row["method"] for row in rows if row["exact"]} == {"none", "pld", "suffix"}
    assert "speed-up" in done.stdout and "All answers, T = 0 " in done.stdout
    assert "speed-up over all suites" in (tmp_path / "report.md").read_text().lower()
    before = (tmp_path / "report.md").read_text()
    assert before.count("![") == 2 and "Machine: " in before and "answers of at most 12 tokens" in before
    (tmp_path / "report.md").unlink()
    done = talon("report", str(tmp_path), "--against", str(tmp_path))
    assert done.exit_code == 0 and done.stdout.startswith("100% of 3 ratios"), done.output
    assert talon("report", str(tmp_path)).exit_code == 0 and (tmp_path / "report.md").read_text() == before


def test_a_later_turn_stands_behind_the_answer_and_is_found_in_the_cache(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"question_id": 1, "category": "", "turns": ["count to nine " * 9, "and back"]}) + "\n")
    options = ["--questions", str(file), "--methods", "suffix", "--max-tokens", "24", "--out", str(tmp_path)]
    done = talon("bench", *options, "--set", f"model={tiny}", "--set", "transport=inproc")
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["suite"], row["turn"]) for row in rows] == [("chat", 1)] * 2 + [("chat, turn 2", 2)] * 2
    for first, second in zip(rows[:2], rows[2:], strict=True):
        assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"] - 2 and second["output_equal"]
        assert first["cached_tokens"] < second["cached_tokens"] <= second["prompt_tokens"]
    assert "Both turns of a conversation" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("turns", "told", "asked"),
    [
        (["x" * 600], "question long of questions: prompt: its 602 tokens leave no room", 0),
        (["hi", "x" * 600], "question long of questions, turn 2: prompt: its ", 3),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_by_its_question_and_a_first_turn_before_any_is_asked(
    tiny: str, questions: str, tmp_path: Path, turns: list[str], told: str, asked: int
) -> None:
    with open(questions, "a") as file:
        file.write(json.dumps({"question_id": "long", "turns": turns}) + "\n")
    options = ["--questions", questions, "--methods", "none", "--max-tokens", "8", "--out", str(tmp_path)]
    (tmp_path / "results.jsonl").write_text("an earlier run's\n")
    done = talon("bench", *options, "--set", f"model={tiny}", "--set", "transport=inproc")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(f"talon: {told}")
    rows = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(rows) == asked if asked else rows == ["an earlier run's"]


def test_all_the_evidence_is_one_command_and_one_report(tiny: str, tmp_path: Path) -> None:
    prompts = [f"Q. Passage: Cats {i} purr.\n\nQuestion: what {i}" for i in range(3)]
    rows = [{"question_id": i, "category": "nq", "turns": [prompt]} for i, prompt in enumerate(prompts)]
    for name in ("gsm8k", "nq_open"):
        text = "".join(json.dumps(row | {"reference": ["cats"]}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    done = talon(
        "evidence", "--questions", str(tmp_path), "--out", str(tmp_path / "out"), "--minutes", "0.01",
        "--max-tokens", "6", "--methods", "none,pld,eagle3", "--served", "pld", "--limit", "2",
        "--set", f"model={tiny}", "--set", "transport=inproc",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "left out: eagle3" in done.stderr and "left out: rivals" in done.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    for section in ("One request, T = 0", "One request, T = 1", "Many requests", "Questions that need knowledge"):
        assert f"## {section}" in report
    assert (tmp_path / "out" / "headline.png").read_bytes().startswith(b"\x89PNG")
    assert talon("evidence", "--questions", str(tmp_path), "--parts", "singel").exit_code == 2
    lost = talon("evidence", "--questions", str(tmp_path), "--out", str(tmp_path / "new"), "--against", "nowhere")
    assert lost.exit_code == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--served", "sufix"), "method='sufix': no such"),
        (("--methods", "none,eagel"), "method='eagel': no such"),
        (("--rivals", "environments", "--gguf", "nowhere"), "--gguf nowhere: no such file"),
    ],
)
def test_what_a_later_part_lacks_is_told_before_the_first(
    options: tuple[str, ...], told: str, questions: str, tmp_path: Path
) -> None:
    shutil.copy(questions, tmp_path / "gsm8k.jsonl")
    done = talon("evidence", "--questions", str(tmp_path), "--out", str(tmp_path / "out"), *options)
    assert done.exit_code == 2 and told in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_contestant_that_cannot_start_is_left_out_with_a_line_and_answers_of_one_token_get_a_report(
    tiny: str, questions: str, tmp_path: Path
) -> None:
    done = talon(
        "bench", "--questions", questions, "--methods", "pld,eagle3", "--limit", "1", "--max-tokens", "1",
        "--heads", str(tmp_path), "--out", str(tmp_path), "--set", f"model={tiny}", "--set", "transport=inproc",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "left out: eagle3" in done.stderr and (tmp_path / "report.md").exists()


def test_acceptance_compares_methods_on_the_same_answers(
    tiny: str, tiny_draft: str, questions: str, tmp_path: Path
) -> None:
    done = talon(
        "acceptance", "--questions", questions, "--limit", "2", "--methods", "sps,pld,sps+pld", "--max-tokens", "12",
        "--temperature", "0", "--temperature", "1", "--out", str(tmp_path),
        "--set", f"model={tiny}", "--set", f"drafter.path={tiny_draft}",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "acceptance.json").read_text())
    ways = [("sps", "chain"), ("sps", "tree"), ("sps", "cut"), ("pld", "cut"), ("sps+pld", "cut")]
    assert [(one["method"], one["way"], one["temperature"]) for one in found] == [
        (*way, temperature) for temperature in (0.0, 1.0) for way in ways
    ]
    emitted = {one["temperature"]: set[int]() for one in found}
    for one in found:
        emitted[one["temperature"]].add(sum(round_["emitted"] for round_ in one["rounds"]))
    assert all(len(totals) == 1 for totals in emitted.values())  # every method writes the same answers
    assert "Tokens a round" in done.stdout and (tmp_path / "acceptance.md").exists()


def test_a_trace_has_the_spans_of_both_workers(tiny: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--set", "verifier.simulated_latency_ms=1"]
    done = talon("generate", "hi", *options, "--max-tokens", "9", "--method", "pld", "--trace", str(trace))
    assert "simulated target latency +1 ms" in done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"prefill", "verify", "draft"} <= {event["name"] for event in events}


def test_check_compares_with_plain_decoding_and_that_with_transformers(
    tiny: str, tiny_draft: str, questions: str
) -> None:
    done = talon(
        "check", "--questions", questions, "--methods", "none,sps", "--transports", "inproc", "--max-tokens", "12",
        "--set", f"model={tiny}", "--set", f"drafter.path={tiny_draft}",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " auto " in line]
    assert [(line[0], line[3]) for line in lines] == [("none", "none"), ("sps", "none"), ("none", "hf")]
    assert [line[5] for line in lines] == ["3", "3", "3"]
    assert "9 of 9 texts are equal; 0 are wrong" in done.stdout


def test_check_agrees_with_transformers_on_a_model_with_a_repetition_penalty_of_its_own(
    questions: str, tmp_path: Path
) -> None:
    model = save_tiny_llama(tmp_path / "penal")
    file = Path(model) / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.1, "do_sample": True}))
    done = talon(
        "check", "--questions", questions, "--methods", "none,pld", "--transports", "inproc", "--max-tokens", "40",
        "--set", f"model={model}", "--set", "dtype=float32",
    )  # fmt: skip
    assert done.exit_code == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " auto " in line]
    assert [line[5] for line in lines] == ["3", "3", "3"], done.stdout
