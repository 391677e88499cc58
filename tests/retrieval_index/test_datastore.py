from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.encode import encode_text
from retrieval_index import build as building
from retrieval_index.build import build
from retrieval_index.corpus import tokenised
from retrieval_index.datastore import Datastore, DatastoreError
from retrieval_index.session_index import CONTEXT
from retrieval_index.suffix_array import likeliest, longest_match, read
from tests.conftest import tiny_tokenizer
from tests.forked_process import ForkedProcess, run_forked

TEXT = "the cat sat on the mat. the cat ran to the door. "


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": TEXT + str(i)}) + "\n" for i in range(40)))
    return path


def texts(folder: Path) -> list[int]:
    """All tokens, shard after shard."""
    return [int(token) for tokens, _ in Datastore(folder).shards for token in tokens]


def context(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


@settings(max_examples=80, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), pattern=st.lists(st.integers(0, 4), max_size=8))
def test_the_longest_match_is_that_of_brute_force(tokens: list[int], pattern: list[int]) -> None:
    suffixes = np.asarray(sorted(range(len(tokens)), key=lambda i: tokens[i:]), np.int32)
    length, first, last = longest_match(np.asarray(tokens, np.uint16), suffixes, np.asarray(pattern, np.int64), 2)
    occurring = [
        n for n in range(2, len(pattern) + 1)
        if any(tokens[i : i + n] == pattern[-n:] for i in range(len(tokens) - n + 1))
    ]  # fmt: skip
    assert length == max(occurring, default=0)
    if length:
        places = {i for i in range(len(tokens)) if tokens[i : i + length] == pattern[-length:]}
        assert set(suffixes[first:last].tolist()) == places
        rows = read(np.asarray(tokens, np.uint16), suffixes, first, last, length, 3, 100, 65535)
        assert rows.tolist() == sorted(rows.tolist())
        assert {tuple(row) for row in rows} == {
            tuple([*tokens[i + length : i + length + 3], -1, -1, -1][:3]) for i in places
        }


def test_the_trie_keeps_the_most_frequent_nodes() -> None:
    rows = np.asarray([[1, 2], [1, 2], [1, 3], [4, -1]], np.int32)
    tokens, parents, shares = likeliest(rows, 9, 4)
    assert tokens.tolist() == [9, 1, 2, 3] and parents.tolist() == [-1, 0, 1, 1]
    assert shares.tolist()[1:] == [0.75, 0.5, 0.25]


def test_answers_come_as_tokens_with_the_end_of_the_prompt_before_them(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(
        '{"tokens": [5, 6]}\n{"tokens": []}\n{"prompt": "the cat sat on the mat", "tokens": [7], "text": "x"}\n'
        '{"prompt": 5, "tokens": [8]}\n{"prompt": ["no", "chat"], "tokens": [9]}\n'
    )
    build(tiny_tokenizer(), [file], tmp_path / "store")
    (found,) = Datastore(tmp_path / "store").texts()
    assert found.dtype == np.int32
    before = encode_text(tiny_tokenizer(), "the cat sat on the mat")[-CONTEXT:]
    assert found.tolist() == [5, 6, -1, *before, 7, -1, 8, -1, 9, -1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"tokens": [1, 100000]}', "line 2: token 100000 is beyond the tokenizer's"),
        ('{"tokens": [-1]}', "line 2: Expected int >= 0"),
        ('{"prompt": "the cat"}', "line 2: neither text nor tokens"),
    ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "answers.jsonl").write_text('{"tokens": [5]}\n' + line)
    with pytest.raises(DatastoreError, match=re.escape(told)):
        build(tiny_tokenizer(), [tmp_path / "answers.jsonl"], tmp_path / "store")


def test_shards_together_hold_the_corpus_and_agree_with_one(corpus: Path, tmp_path: Path) -> None:
    whole = build(tiny_tokenizer(), [corpus], tmp_path / "one")
    parts = build(tiny_tokenizer(), [corpus], tmp_path / "many", shard_tokens=500)
    assert len(whole.shards) == 1 and len(parts.shards) > 3
    assert texts(tmp_path / "one") == texts(tmp_path / "many")
    length, rows = Datastore(tmp_path / "many").continuations(context("the cat"))
    assert length == len(context("the cat")) and rows.tolist() == sorted(rows.tolist())


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def with_another_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)


def of_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("kind", "damage", "read", "told"),
    [
        ("tokens", cut_short, Datastore, "truncated"),
        ("suffixes", cut_short, Datastore, "truncated"),
        ("tokens", with_another_bit, lambda folder: Datastore(folder).verify(), "damaged"),
        ("tokens", of_zeros, lambda folder: [*Datastore(folder).texts()], r"0000\.tokens: damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_whoever_reads_it(
    corpus: Path, tmp_path: Path, kind: str, damage: Callable[[Path], None], read: Callable[[Path], Any], told: str
) -> None:
    build(tiny_tokenizer(), [corpus], tmp_path / "store")
    damage(tmp_path / "store" / f"0000.{kind}")
    with pytest.raises(DatastoreError, match=told):
        read(tmp_path / "store")


def test_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    build(tiny_tokenizer(), [corpus], tmp_path / "store")
    other = tiny_tokenizer()
    other.add_tokens(["<|more|>"])
    with pytest.raises(DatastoreError, match="another tokenizer"):
        Datastore(tmp_path / "store", other)


@pytest.mark.parametrize("name, content", [("a.jsonl", b""), ("a.txt", b" \n")])
def test_an_empty_corpus_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatastoreError, match="holds no text"):
        build(tiny_tokenizer(), [tmp_path / name], tmp_path / "store")


def test_blank_texts_are_passed_over_wherever_they_stand(tmp_path: Path) -> None:
    texts = ["", "the cat", " \n", "sat", ""]
    for name, rows in (("blank", texts), ("plain", [text for text in texts if text.strip()])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        build(tiny_tokenizer(), [file], tmp_path / name)
    assert [tokens.tolist() for tokens, _ in Datastore(tmp_path / "blank").shards] == [
        tokens.tolist() for tokens, _ in Datastore(tmp_path / "plain").shards
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.txt.xz", "a.txt.gz"])
@pytest.mark.parametrize("junk", [b"\x00\x01\x02abc\n", b"\xff\xfe\x80\x81"])
def test_binary_junk_is_refused(tmp_path: Path, name: str, junk: bytes) -> None:
    (tmp_path / name).write_bytes(junk)
    with pytest.raises(DatastoreError, match=name):
        build(tiny_tokenizer(), [tmp_path / name], tmp_path / "store")


BUILD = """
import sys
from pathlib import Path
from retrieval_index import build as building
from tests.conftest import tiny_tokenizer

write = building.write_shard

def slowly(out, number, *rest):
    if number == 2:
        print("two shards", flush=True)
        sys.stdin.readline()
    return write(out, number, *rest)

building.write_shard = slowly
building.build(tiny_tokenizer(), [Path(sys.argv[1])], Path(sys.argv[2]), shard_tokens=300)
"""


def test_a_builder_killed_by_the_system_is_taken_over(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with ForkedProcess(
        [sys.executable, "-c", BUILD, str(corpus), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as builder:
        assert builder.stdout is not None and builder.stdout.readline()
        with pytest.raises(DatastoreError, match="another process is building"):
            build(tiny_tokenizer(), [corpus], out, shard_tokens=300)
        builder.kill()
    with pytest.raises(DatastoreError, match="not a datastore"):
        Datastore(out)
    first = (out / "0001.suffixes").stat().st_mtime_ns
    build(tiny_tokenizer(), [corpus], out, shard_tokens=300)
    assert (out / "0001.suffixes").stat().st_mtime_ns == first, "finished shards are not built again"
    build(tiny_tokenizer(), [corpus], tmp_path / "straight", shard_tokens=300)
    assert texts(out) == texts(tmp_path / "straight")
    Datastore(out).verify()


LIMITED = """
import resource, signal, sys
from engine.cli.index import app
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # a module's file that is cut off would be read by the next process
for limit in (100, 6000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        app(["build", *sys.argv[2:], "--out", f"{sys.argv[1]}/{limit}"])
    except SystemExit as end:
        print(limit, end.code)
"""


def test_a_disk_that_fills_up_is_one_line_and_the_build_goes_on_later(corpus: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk: it fails in the same place, in the middle of one."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = ["--tokenizer", str(tmp_path / "tokenizer"), "--input", str(corpus)]
    done = run_forked(LIMITED, str(tmp_path), *options)
    assert done.stdout.splitlines()[-2:] == ["100 2", "6000 2"], done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("talon: ")]
    assert len(told) == 2 and all("disk full" in line for line in told)
    for limit, left in ((100, set[str]()), (6000, {"progress.json", "0000.tokens"})):
        store = tmp_path / str(limit)
        assert {path.name for path in store.iterdir()} == {"lock", *left}
        build(tiny_tokenizer(), [corpus], store, 32_000_000)
        Datastore(store).verify()


@pytest.mark.parametrize("place", [-1, -(2**31), 10**6, 2**31 - 1])
def test_suffixes_that_point_out_of_the_corpus_are_refused_when_it_is_opened(
    corpus: Path, tmp_path: Path, place: int
) -> None:
    """The search would read memory that is not the corpus's, and the process would end."""
    build(tiny_tokenizer(), [corpus], tmp_path / "store")
    path = tmp_path / "store" / "0000.suffixes"
    suffixes = np.fromfile(path, np.int32)
    suffixes[len(suffixes) // 2] = place
    path.write_bytes(suffixes.tobytes())
    with pytest.raises(DatastoreError, match=r"0000\.suffixes: damaged"):
        Datastore(tmp_path / "store")


def test_a_header_that_is_foreign_or_names_no_tokens_is_refused(corpus: Path, tmp_path: Path) -> None:
    build(tiny_tokenizer(), [corpus], tmp_path / "store")
    header = tmp_path / "store" / "header.json"
    whole, empty = json.loads(header.read_text()), {"name": "0000", "tokens": 0, "tokens_crc": 0, "suffixes_crc": 0}
    nameless = [json.dumps(whole | {"shards": shards}) for shards in ([], [empty])]
    for content in ("{}", "\x00", "[1]", *nameless):
        header.write_text(content)
        with pytest.raises(DatastoreError, match="names no tokens: build" if content in nameless else "build it again"):
            Datastore(tmp_path / "store")


def test_an_index_without_its_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(DatastoreError, match=r"pydivsufsort is missing: pip install 'talon-decoding\[index\]'"):
        building.build(None, [tmp_path / "not read"], tmp_path / "store")


def test_a_large_text_is_tokenised_a_piece_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text("ab" * 300_000)
    plain, asked = tiny_tokenizer(), list[int]()

    class Counting:
        def __len__(self) -> int:
            return len(plain)

        def __call__(self, text: Any, **options: Any) -> Any:
            asked.append(len(text))
            return plain(text, **options)

    (found,) = tokenised(Counting(), [tmp_path / "large.txt"], 0, 65535)
    assert found.dtype == np.uint32 and max(asked) < len(found) / 2
    assert plain.decode(found[:-1]) == "ab" * 300_000 and found[-1] == 65535
