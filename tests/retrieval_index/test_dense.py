from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.cli.index import app
from retrieval_index import build as building
from retrieval_index.datastore import Datastore, DatastoreError
from retrieval_index.dense import FILES, DenseIndex
from retrieval_index.dense_build import build_dense
from retrieval_index.embedding import TextEmbedding, spellings
from tests.conftest import VOCABULARY, tiny_tokenizer
from tests.forked_process import ForkedProcess

EMBEDDING = np.random.default_rng(0).standard_normal((VOCABULARY, 24)).astype(np.float32)
TEXTS = ["zebras graze", "quick foxes jump", "a wavy blue sea", "dry hot deserts", "my wooden house"]


def encode(text: str) -> list[int]:
    tokens: list[int] = tiny_tokenizer().encode(text)
    return tokens


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    build_dense(tiny_tokenizer(), EMBEDDING, [corpus], tmp_path / "dense")
    return tmp_path / "dense"


def test_a_passage_is_the_nearest_to_its_own_text(folder: Path) -> None:
    index = DenseIndex(folder, tiny_tokenizer())
    for text in TEXTS:
        best, second = index.query(encode(text), 2)
        assert tiny_tokenizer().decode(best.tokens) == text
        assert best.score == pytest.approx(1, abs=1e-3) and best.score > second.score
    assert len(index.query(encode("sea"), 100)) == len(TEXTS)


def test_spellings_are_one_word() -> None:
    word = spellings(tiny_tokenizer())
    assert word[encode("A")[0]] == word[encode("a")[0]] != word[encode("b")[0]]
    assert len({word[token] for token in encode("é")}) == 2, "parts of characters are no spellings of each other"


def test_rare_words_say_what_a_text_is_about() -> None:
    passages = [np.asarray(encode("aaaa" + letter)) for letter in "bcdefgh"]
    embed = TextEmbedding.fit(tiny_tokenizer(), EMBEDDING, passages)
    embed.learn_common([embed.directions(passages)])
    asked, vectors = embed([encode("c aaaaaaaa")])[0], embed(passages)
    assert int(np.argmax(vectors @ asked)) == 1


def test_a_text_of_nothing_known_finds_something_and_does_not_fail(folder: Path) -> None:
    assert len(DenseIndex(folder).query([], 2)) == 2
    assert len(DenseIndex(folder).query([0, 10**6], 2)) == 2


def test_long_documents_are_cut_into_equal_passages(corpus: Path, tmp_path: Path) -> None:
    header = build_dense(tiny_tokenizer(), EMBEDDING, [corpus], tmp_path / "out", passage_tokens=8)
    index = DenseIndex(tmp_path / "out")
    assert "".join(tiny_tokenizer().decode(index.passage(i)) for i in range(header.passages)) == "".join(TEXTS)
    assert max(len(index.passage(i)) for i in range(header.passages)) <= 8


def test_a_large_index_is_compressed_and_still_finds(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = ["".join(chr(97 + c) for c in rng.integers(0, 26, 12)) for _ in range(1200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, large in (("flat", 10_000), ("cells", 1000)):
        build_dense(tiny_tokenizer(), EMBEDDING, [tmp_path / "a.jsonl"], tmp_path / name, large=large)
    flat, cells = ((tmp_path / name / "index.faiss").stat().st_size for name in ("flat", "cells"))
    assert cells < flat / 2
    index = DenseIndex(tmp_path / "cells")
    found = [text in [tiny_tokenizer().decode(p.tokens) for p in index.query(encode(text), 10)] for text in texts[:50]]
    assert sum(found) > 40


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files_are_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DatastoreError, match=f"{name}: missing or truncated"):
        DenseIndex(folder)
    path.unlink()
    with pytest.raises(DatastoreError, match=f"{name}: missing or truncated"):
        DenseIndex(folder)


@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_faiss_never_sees_it(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DatastoreError, match=f"{name}: damaged"):
        DenseIndex(folder).verify()


def test_foreign_folders_are_refused(folder: Path, tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DatastoreError, match="not a dense index"):
        DenseIndex(tmp_path)
    with pytest.raises(DatastoreError, match="not a datastore"):
        Datastore(folder)
    building.build(tiny_tokenizer(), [corpus], tmp_path / "store")
    with pytest.raises(DatastoreError, match="not a dense index"):
        DenseIndex(tmp_path / "store")
    for taken in (folder, tmp_path / "store"):
        with pytest.raises(DatastoreError, match="name an empty folder"):
            build_dense(tiny_tokenizer(), EMBEDDING, [corpus], taken)
    for content in (b"{}", b"\x00", b"[1]", (folder / "header.json").read_bytes().replace(b'ion":1', b'ion":9')):
        (folder / "header.json").write_bytes(content)
        with pytest.raises(DatastoreError, match="build it"):
            DenseIndex(folder)


def test_another_tokenizer_is_refused(folder: Path, corpus: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["<|more|>"])
    with pytest.raises(DatastoreError, match="another tokenizer"):
        DenseIndex(folder, other)
    with pytest.raises(DatastoreError, match="name its own directory"):
        build_dense(other, EMBEDDING, [corpus], tmp_path / "other")


def test_blank_texts_are_no_passages(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": ""}\n{"text": "the cat sat"}\n{"text": "  "}\n')
    assert build_dense(tiny_tokenizer(), EMBEDDING, [tmp_path / "corpus.jsonl"], tmp_path / "index").passages == 1


@pytest.mark.parametrize(("content", "told"), [(b"", "holds no text"), (b" \n", "a.txt"), (b"\x00\xff", "a.txt")])
def test_an_empty_or_binary_corpus_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DatastoreError, match=told):
        build_dense(tiny_tokenizer(), EMBEDDING, [tmp_path / "a.txt"], tmp_path / "out")


def test_a_full_disk_is_named_and_the_build_can_be_run_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(DatastoreError, match="disk full"):
            build_dense(tiny_tokenizer(), EMBEDDING, [corpus], tmp_path / "dense")
    assert [path.name for path in (tmp_path / "dense").iterdir()] == ["lock"]
    build_dense(tiny_tokenizer(), EMBEDDING, [corpus], tmp_path / "dense")
    DenseIndex(tmp_path / "dense").verify()


BUILD = """
import os, sys
from pathlib import Path
from retrieval_index import dense_build
from tests.conftest import tiny_tokenizer
from tests.retrieval_index.test_dense import EMBEDDING

replace = Path.replace

def slowly(temporary, path):
    replace(temporary, path)
    print(path.name, flush=True)
    sys.stdin.readline()

Path.replace = slowly
dense_build.build_dense(tiny_tokenizer(), EMBEDDING, [Path(sys.argv[1])], Path(sys.argv[2]), part_tokens=20)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("last", "read", "fitted", "embedded"),
    [
        ("0001.passages", 3, 1, 3),  # not yet noted, so its two documents are read again, and the last
        pytest.param("embedding.tokens", 0, 0, 3, marks=pytest.mark.slow),
        ("0001.directions", 0, 0, 1),
        pytest.param("index.faiss", 0, 0, 0, marks=pytest.mark.slow),
        ("header.json", 0, 0, 0),
    ],
)
def test_a_killed_build_goes_on_where_it_was_and_gives_the_same_index(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, read: int, fitted: int, embedded: int
) -> None:
    out = tmp_path / "dense"
    build_dense(tiny_tokenizer(), EMBEDDING, [corpus], tmp_path / "straight", part_tokens=20)
    with ForkedProcess(
        [sys.executable, "-c", BUILD, str(corpus), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as builder:
        assert builder.stdin is not None and builder.stdout is not None
        while (name := builder.stdout.readline().strip().decode()) != last:
            assert name, "the builder ended"
            builder.stdin.write(b"\n")
            builder.stdin.flush()
        with pytest.raises(DatastoreError, match="another process is building"):
            build_dense(tiny_tokenizer(), EMBEDDING, [corpus], out, part_tokens=20)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    if last != "header.json":
        with pytest.raises(DatastoreError, match="not a dense index"):
            DenseIndex(out)
    (out / "0000.passages.1.tmp").write_bytes(b"half")
    fits, parts = Mock(wraps=TextEmbedding.fit), Mock(wraps=TextEmbedding.directions)
    monkeypatch.setattr(TextEmbedding, "fit", fits)
    monkeypatch.setattr(TextEmbedding, "directions", lambda *arguments: parts(*arguments))
    report = Mock()
    build_dense(tiny_tokenizer(), EMBEDDING, [corpus], out, report=report, part_tokens=20)
    assert (report.call_count, fits.call_count, parts.call_count) == (read, fitted, embedded)
    assert contents(out) == contents(tmp_path / "straight")
    DenseIndex(out).verify()


def test_a_build_begun_with_anything_else_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dense"
    monkeypatch.setattr(TextEmbedding, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_dense(tiny_tokenizer(), EMBEDDING, [corpus], out, part_tokens=20)
    other = tmp_path / "other.jsonl"
    other.write_bytes(corpus.read_bytes())
    with pytest.raises(DatastoreError, match="begun with other inputs"):
        build_dense(tiny_tokenizer(), EMBEDDING, [other], out, part_tokens=20)
    with pytest.raises(DatastoreError, match="begun with other inputs"):
        build_dense(tiny_tokenizer(), 2 * EMBEDDING, [corpus], out, part_tokens=20)
    with pytest.raises(DatastoreError, match="begun with other inputs"):
        building.build(tiny_tokenizer(), [corpus], out)
    (out / "0000.passages").write_bytes(b"junk")
    with pytest.raises(DatastoreError, match=r"0000\.passages: damaged"):
        build_dense(tiny_tokenizer(), EMBEDDING, [corpus], out, part_tokens=20)


def test_the_commands_build_inspect_and_ask(tiny: str, corpus: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "index")
    run = CliRunner().invoke
    built = run(app, ["build", "--dense", "--tokenizer", tiny, "--input", str(corpus), "--out", out])
    assert built.exit_code == 0 and "5 passages" in built.stdout
    told = run(app, ["info", out])
    assert "passages   5" in told.stdout and "checksums  match" in told.stdout
    asked = run(app, ["query", out, "the sea, wavy and blue", "--tokenizer", tiny, "--count", "1"])
    assert "a wavy blue sea" in asked.stdout


@pytest.mark.parametrize("starts", [[0, 10**9], [5, 2], [-3, 0]])
def test_passages_that_leave_the_corpus_are_refused_when_it_is_opened(folder: Path, starts: list[int]) -> None:
    path = folder / "passages.starts"
    damaged = np.fromfile(path, np.int64)
    damaged[-2:] = starts
    path.write_bytes(damaged.tobytes())
    with pytest.raises(DatastoreError, match=r"passages\.starts: damaged"):
        DenseIndex(folder)
