from __future__ import annotations

import errno
import json
import os
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from engine.api import Engine
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.kernels.quant.stored import StoredMatrix
from engine.model.loading import load_config, load_model, skeleton
from engine.model.target import Target
from engine.weights.gguf import header, source, weights
from engine.weights.gguf.describe_process import main
from engine.weights.gguf.described_folder import described
from engine.weights.gguf.families import llama3_factors
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import SOURCE, open_gguf
from tests.engine.weights.tiny_gguf import TEMPLATE, TOKENS, change_last_byte

CLOSED = ["<|close|>" if token == "<|end|>" else token for token in TOKENS]
"""Tokens none of which llama.cpp takes for an end by its text."""


def nothing(*_: Any) -> None:
    """Nobody watches the progress."""


def left_in(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock"))


@pytest.mark.parametrize(("way", "words"), [("smollm", ["a", "ĠĠ", "4", "8"]), ("gpt-2", ["a", "Ġ", "Ġ", "48"])])
def test_each_digit_is_a_word_where_the_vocabulary_says_so(
    directory: Callable[..., Path], way: str, words: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory(values={"tokenizer.ggml.pre": way}))
    assert tokenizer.tokenize("a  48") == words


@pytest.mark.parametrize(
    ("vocabulary", "tokens"),
    [*((name, ["hi"]) for name in ("llama-bpe", "tekken", "glm4", "minicpm5", "youtu")), ("kimi-k2", ["h", "i"])],
)
def test_a_word_that_is_a_token_needs_no_merges_where_the_vocabulary_says_so(
    vocabulary: str, tokens: list[str], directory: Callable[..., Path]
) -> None:
    named = ["hi" if token == "~" else token for token in TOKENS]
    values = {"tokenizer.ggml.pre": vocabulary, "tokenizer.ggml.tokens": named}
    assert AutoTokenizer.from_pretrained(directory(values=values)).tokenize("hi") == tokens


def test_an_unknown_way_of_splitting_text_is_told(
    directory: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    directory(values={"tokenizer.ggml.pre": "martian"})
    assert "talon: tiny.gguf: text is split into words as for GPT-2; 'martian' is not known" in capfd.readouterr().out


def test_no_token_is_added_to_those_of_the_file(directory: Callable[..., Path]) -> None:
    assert AutoTokenizer.from_pretrained(directory()).get_vocab() == {token: i for i, token in enumerate(TOKENS)}


@pytest.mark.parametrize(
    ("vocabulary", "said", "wanted"),
    [
        ("smollm", True, True),
        ("smollm", False, False),
        ("smollm", None, False),
        ("llama-bpe", False, False),
        ("llama-bpe", None, True),
        ("tekken", None, True),
    ],
)
def test_the_file_or_its_kind_of_vocabulary_says_whether_text_begins_with_a_token(
    directory: Callable[..., Path], vocabulary: str, said: bool | None, wanted: bool
) -> None:
    values = {"tokenizer.ggml.pre": vocabulary, "tokenizer.ggml.add_bos_token": said}
    tokenizer = AutoTokenizer.from_pretrained(directory(values=values))
    assert tokenizer("hi")["input_ids"] == [0] * wanted + [TOKENS.index("h"), TOKENS.index("i")]


def test_chat_template_and_special_tokens_come_from_the_file_alone(
    directory: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text("another model's")
    tokenizer = AutoTokenizer.from_pretrained(directory())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "h"}], tokenize=False)
    assert text == "<|user|>h<|end|><|assistant|>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [1, TOKENS.index("h"), 3, 2]


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ({"tokenizer.ggml.eos_token_id": 0}, [0, 3]),
        ({"tokenizer.ggml.eos_token_id": None}, [3]),
        ({f"tokenizer.ggml.{kind}_token_id": at for at, kind in enumerate(("eos", "eot", "eom"))}, [0, 1, 2, 3]),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ messages[0].content }}"}, [0]),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ raise_exception('no') }}"}, [0]),
        (
            {
                "tokenizer.ggml.eos_token_id": 0,
                "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}"
                "{{ '<|text|>' if loop.last else '<|close|>' }}{% endfor %}",
            },
            [0],
        ),
    ],
    ids=["end of text", "none", "all three", "no end of turn", "a template that refuses", "its last turn counts"],
)
def test_every_end_that_the_file_implies_is_taken(
    directory: Callable[..., Path], values: dict[str, Any], ends: list[int]
) -> None:
    own = {"tokenizer.ggml.tokens": CLOSED, "tokenizer.chat_template": TEMPLATE.replace("<|end|>", "<|close|>")}
    folder = directory(values=own | values)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_the_directory_holds_a_card_and_no_weights(directory: Callable[..., Path]) -> None:
    folder = directory(kind=Kind.Q4_1)
    card = (folder / "README.md").read_text()
    assert "Made for a test." in card and "15 Q4_1" in card and "stay in it" in card
    assert sum(file.stat().st_size for file in folder.iterdir()) < 60_000


@pytest.mark.parametrize(
    ("values", "family"),
    [({}, "mistral"), ({"llama.expert_count": 4, "llama.expert_used_count": 2}, "mixtral")],
    ids=["dense", "with experts"],
)
def test_a_llama_by_the_name_of_mistral_has_no_window(
    directory: Callable[..., Path], values: dict[str, Any], family: str
) -> None:
    config = json.loads((directory(values=values | {"general.name": "mistral"}) / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == (family, None)


def test_llama_3s_factors_become_its_scaling_of_positions(directory: Callable[..., Path]) -> None:
    factors = llama3_factors(10_000.0, 8, 32.0).astype(np.float32)
    folder = directory(tensors={"rope_freqs.weight": factors})
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "llama3" and rope["factor"] == 32
    turned = skeleton(str(folder), load_config(str(folder))).model.rotary_emb.inv_freq
    plain = 10_000.0 ** (-np.arange(8) / 8)
    assert torch.allclose(turned, torch.tensor(plain / factors, dtype=torch.float32))


@pytest.mark.parametrize(
    "named",
    [{"scaling.type": "linear", "scaling.factor": 4.0}, {"scaling.factor": 4.0}, {"scale_linear": 4.0}],
    ids=["with its kind", "without a kind", "by the old key"],
)
def test_positions_are_divided_by_the_factor_that_a_file_names(
    directory: Callable[..., Path], named: dict[str, Any]
) -> None:
    folder = str(directory(values={f"llama.rope.{key}": value for key, value in named.items()}))
    turned = skeleton(folder, load_config(folder)).model.rotary_emb.inv_freq
    assert torch.allclose(turned, torch.tensor(10_000.0 ** (-np.arange(8) / 8) / 4, dtype=torch.float32))


@pytest.mark.parametrize("named", [{"scaling.type": "none", "scaling.factor": 4.0}, {"scaling.factor": 0.0}])
def test_positions_are_not_scaled_by_a_factor_that_does_not_count(
    directory: Callable[..., Path], named: dict[str, Any]
) -> None:
    folder = directory(values={f"llama.rope.{key}": value for key, value in named.items()})
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "default"


def test_a_file_is_described_once_until_it_changes(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Path] = []
    monkeypatch.setattr("engine.weights.gguf.described_folder.describe", lambda file, folder, *_: runs.append(folder))
    path = write()
    first = described(path, f"model={path}", nothing)
    assert described(path, f"model={path}", nothing) == first
    os.utime(path, ns=(0, 0))
    assert described(path, f"model={path}", nothing) == first, "a copy's time says nothing of its content"
    change_last_byte(path)
    assert described(path, f"model={path}", nothing) != first
    assert len(runs) == 2


def test_a_file_is_read_again_only_when_it_may_have_changed(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, reads = source._hash, []
    monkeypatch.setattr(source, "_hash", lambda content, size: reads.append(size) or usual(content, size))
    monkeypatch.setattr("engine.weights.gguf.described_folder.describe", lambda *_: None)
    path = write()
    time.sleep(2 * source._TICK_NS / 1e9)

    def used() -> None:
        folder = described(path, f"model={path}", nothing)
        assert source.is_unchanged(folder, source.source_of(folder))

    used(), used()
    assert reads == [path.stat().st_size]
    os.utime(path)
    time.sleep(2 * source._TICK_NS / 1e9)
    used(), used()
    assert reads == [path.stat().st_size] * 2


def test_a_file_cut_short_anywhere_is_one_line(write: Callable[..., Path]) -> None:
    path = write()
    content = path.read_bytes()
    start = read_gguf(path, "model=x").parts[0].start
    for length in [*range(4, start, 97), start, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="cut short") as caught:
            read_gguf(path, "model=x")
        assert "\n" not in str(caught.value) and "model=x" in str(caught.value)


def test_damage_to_the_head_is_either_harmless_or_told(write: Callable[..., Path]) -> None:
    path = write()
    content, prob = path.read_bytes(), random.Random(0)
    start = read_gguf(path, "model=x").parts[0].start
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(prob.choice([1, 1, 8])):
            damaged[prob.randrange(start)] = prob.randrange(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path, "model=x")
        except ModelError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no GGUF file"),
        (b"PK\x03\x04 something else", "is no GGUF file"),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\0\0\0\x03", "byte order"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "cut short"),
    ],
)
def test_what_is_no_gguf_file_of_today_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=told):
        read_gguf(tmp_path / "x.gguf", "model=x.gguf")


@pytest.mark.parametrize(
    ("kind", "value"), [(6, struct.pack("<f", 32.0)), (7, b"\1"), (8, struct.pack("<Q", 2) + b"32")]
)
def test_an_alignment_that_is_no_whole_number_is_one_line(tmp_path: Path, kind: int, value: bytes) -> None:
    name, path = b"general.alignment", tmp_path / "x.gguf"
    pair = struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair + bytes(64))
    with pytest.raises(ModelError, match=r"^model=x: .*general\.alignment is .*; download it again$"):
        read_gguf(path, "model=x")


def test_an_unknown_architecture_is_one_printable_line_and_leaves_nothing(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(architecture="mars\x1b]0;gotcha\x07" + "a" * 9999)
    with pytest.raises(ModelError) as caught:
        described(path, f"model={path}", nothing)
    told = str(caught.value)
    assert told.startswith(f"model={path}: cannot be read from GGUF (mars\\x1b]0;gotcha\\x07aaa")
    assert told.isprintable() and len(told) < 3000 and "not supported" in told
    assert left_in(tmp_path / "home") == []


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            "kill -KILL $$",
            r"cannot be read from GGUF \(llama\): killed by signal 9, .*; use the Hugging Face directory.*",
        ),
        ("kill -BUS $$", r"cannot be read from GGUF \(llama\): the file was cut short while it was read; use .*"),
        (f"echo 'talon: it ends in zeros'; exit {errno.EBADMSG}", "it ends in zeros"),
    ],
    ids=["killed", "finds a cut file", "finds damage"],
)
def test_a_reader_that_is_killed_or_finds_damage_is_told_and_leaves_nothing(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, told: str
) -> None:
    path = write()
    popen = subprocess.Popen
    patched = "engine.weights.gguf.described_folder.subprocess.Popen"
    monkeypatch.setattr(patched, lambda _, **options: popen(["sh", "-c", end], **options))
    with pytest.raises(ModelError, match=f"^model={path}: {told}$"):
        described(path, f"model={path}", nothing)
    assert left_in(tmp_path / "home") == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_reader_that_finds_the_disk_full_ends_with_that_number(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr("engine.weights.gguf.describe_process.describe", full)
    monkeypatch.setattr("threading.Thread.start", nothing)  # which would read this process's standard input
    monkeypatch.setattr(sys, "argv", ["describe", str(write()), str(tmp_path), "tiny", "made"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == errno.ENOSPC


async def test_a_gguf_file_answers_as_its_directory(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], describes_here: None
) -> None:
    path = write(kind=Kind.Q8_0, values={"tokenizer.ggml.eos_token_id": 0})
    options: dict[str, Any] = {"method": "suffix", "transport": "inproc"}
    sampling = SamplingParams(max_tokens=16)
    async with await Engine.start({"model": str(path)}, **options) as engine:
        answer = await engine.generate("ab 48", sampling)
        folder = engine.config.model
    assert f"model={path}: answers end at '<|text|>' (0) and '<|end|>' (3)\n" in capsys.readouterr().err
    assert Path(folder).parent == tmp_path / "home" / "gguf" and Path(folder).name.startswith("tiny-")
    async with await Engine.start({"model": folder}, **options) as engine:
        assert (await engine.generate("ab 48", sampling)).token_ids == answer.token_ids


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 4}', b'{"file": "x", "format": 99}'])
def test_a_directory_of_another_version_describes_no_file(directory: Callable[..., Path], content: bytes) -> None:
    folder = directory()
    (folder / SOURCE).write_bytes(content)
    assert open_gguf(folder) is None


def test_a_file_replaced_while_it_is_read_stays_what_it_was(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write()
    opened = read_gguf(path, "model=x")
    before = [opened.read(tensor) for tensor in opened.tensors]
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    (tmp_path / "other").replace(path)
    assert all(np.array_equal(opened.read(tensor), raw) for tensor, raw in zip(opened.tensors, before, strict=True))


@pytest.mark.parametrize("field", ["model=x", "drafter.path=x", "model"])
def test_a_file_cut_while_it_is_read_is_one_line_with_the_key_that_names_it(
    field: str, write: Callable[..., Path]
) -> None:
    path = write()
    opened = read_gguf(path, field)
    matrix = next(tensor for tensor in opened.tensors if len(tensor.shape) == 2)
    os.truncate(path, opened.parts[0].start)
    told = re.escape(f"{field.partition('=')[0]}={path}: the GGUF file was cut short while it was read; get it again")
    for read in (lambda: opened.read(matrix), lambda: opened.read_rows(matrix, [0])):
        with pytest.raises(ModelError, match=f"^{told}$"):
            read()


def test_a_shape_that_is_not_whole_blocks_is_told(write: Callable[..., Path]) -> None:
    path = write(kind=Kind.Q8_0)
    tensor = next(tensor for tensor in read_gguf(path, "model=x").tensors if tensor.kind is Kind.Q8_0)
    name, content = tensor.name.encode(), path.read_bytes()
    at = content.index(name) + len(name) + 4
    for wrong in (0, tensor.shape[0] - 1):
        path.write_bytes(content[:at] + wrong.to_bytes(8, "little") + content[at + 8 :])
        with pytest.raises(ModelError, match=rf"tensor '{tensor.name}' of type Q8_0 has shape \[{wrong}, "):
            read_gguf(path, "model=x")


@pytest.mark.parametrize(
    ("key", "wrong", "told"),
    [
        *(
            (f"tokenizer.ggml.{kind}_token_id", 262, "the file has 262 tokens")
            for kind in ("eos", "eot", "bos", "padding")
        ),
        ("llama.block_count", 1_000_000_000, "its tensors are of 2; get the file again"),
        ("llama.embedding_length", 65, "its tensors are of 64; get the file again"),
        ("llama.context_length", 1 << 30, "the most is 16,777,216; get the file again"),
        ("llama.attention.head_count", 1 << 30, "the most is 16,777,216; get the file again"),
        ("llama.feed_forward_length", 0.5, "the most is 16,777,216; get the file again"),
    ],
)
def test_numbers_that_no_model_has_are_told_before_one_is_made(
    write: Callable[..., Path], key: str, wrong: float, told: str
) -> None:
    path = write(values={key: wrong})
    with pytest.raises(ModelError, match=rf"^model=x: .*{re.escape(f'{key} is {wrong}, and {told}')}"):
        read_gguf(path, "model=x")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"values": {"split.count": 3}}, r"one of 3 parts, whose names have to end in -00001-of-00003\.gguf"),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3, np.float32)}}, "not those of Llama 3"),
        ({"tensors": {"rope_factors_long.weight": np.ones(8, np.float32)}}, "rope_"),
        ({"values": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "transformers reads"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "mlp.up_proj"),
    ],
)
def test_what_would_not_be_followed_or_read_in_all_is_refused(
    directory: Callable[..., Path], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        load_model(str(directory(**changes)), "auto", torch.device("cpu"))


def test_a_name_that_two_tensors_have_is_told(write: Callable[..., Path]) -> None:
    path = write()
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(ModelError, match="20 tensors have 19 names"):
        read_gguf(path, "model=x")


def test_a_string_as_long_as_the_file_is_told_before_it_is_read(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    monkeypatch.setattr(header, "_LARGEST", 1000)
    monkeypatch.setattr(header, "_CHUNK", 64)
    with pytest.raises(ModelError, match=r"damaged or newer than Talon \(its head has "):
        read_gguf(path, "model=x")


@pytest.mark.parametrize(("key", "wrong"), [("feed_forward_length", 128), ("attention.head_count_kv", 1)])
def test_sizes_that_the_tensors_contradict_are_one_line(directory: Callable[..., Path], key: str, wrong: int) -> None:
    folder = directory(kind=Kind.Q8_0, values={f"llama.{key}": wrong})
    with pytest.raises(ModelError, match=r"weights have other sizes than its configuration says, model\.") as caught:
        Target.load(str(folder))
    assert "\n" not in str(caught.value)


def test_a_type_that_nobody_reads_is_one_line(directory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = directory(kind=Kind.Q8_0)

    def unread(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(weights, "has_layout", lambda kind: False)
    monkeypatch.setattr(StoredMatrix, "values", unread)
    with pytest.raises(ModelError, match=r"tensor \S+ is of type Q8_0, which is not read; take another quantisation"):
        Target.load(str(folder))
