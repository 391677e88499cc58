"""Our tokenizer does what the tokenizer of transformers does that it was taken from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.text.tokenizer import Tokenizer as OwnTokenizer
from engine.text.tokenizer import TokenizerState
from engine.weights.cache import home
from engine.weights.tokenizer import state_of
from tests.conftest import sentencepiece_tokenizer, tiny_tokenizer

Both = tuple[OwnTokenizer, Any]


def qwen_like() -> Any:
    """Return a tokenizer of bytes that composes characters first, with added tokens that are special and others that
    are not.
    """
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", AddedToken("<pad>", lstrip=True)])
    backend.add_tokens(["<tool_call>", AddedToken("<think>", rstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")


def llama_like() -> Any:
    """Llama 2's: a space before the text, bytes as tokens, the token that begins texts, and an unknown one."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlor", "\u2581a"]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    space = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, clean_up_tokenization_spaces=False)


def splitting() -> Any:
    """One for which text never spells special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.split_special_tokens = True
    return tokenizer


MADE: list[Callable[[], Any]] = [tiny_tokenizer, sentencepiece_tokenizer, qwen_like, llama_like, splitting]


@pytest.fixture(params=MADE, ids=lambda made: made.__name__)
def both(request: pytest.FixtureRequest) -> Both:
    return pair(request.param())


def pair(tokenizer: Any) -> Both:
    """Ours, from what is kept of it, and that of transformers."""
    state = state_of(tokenizer)
    assert state is not None
    return OwnTokenizer(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=TokenizerState)), tokenizer


def texts(tokenizer: Any) -> Iterator[str]:
    yield from (
        "",
        " ",
        "  a  b",
        "\n\n x",
        "e\u0301 caf\u00e9 \u212b \ufb01",
        "\u65e5\u672c\u8a9e \U0001f916\u200d\U0001f469",
    )
    yield from (
        "a\0b\x7f\t\r\n",
        "<0x0A> <s></s> <unk>",
        "\u2581a \u2581\u2581b",
        "\ufffd\u2028\u00a0",
        "I'm 1234.5 a , b",
    )
    choice, every = random.Random(7), list(tokenizer.added_tokens_decoder.values())
    for added in choice.sample(every, min(len(every), 100)):
        yield from (added.content, f"a{added.content}b", f" {added.content} {added.content}\n", added.content[:-1])
    letters = [*"abc ABC 012.,'\"!\n\t<>|\u2581\u0120", "\u00e9", "\u0301", "\u6f22", "\U0001f916", "\u200d"]
    yield from ("".join(choice.choices(letters, k=choice.randrange(1, 60))) for _ in range(100))


def check_equal(ours: OwnTokenizer, theirs: Any) -> None:
    """Raises AssertionError if the two differ in anything."""
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours.all_special_ids == theirs.all_special_ids
    names = ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "chat_template", "special_tokens_map")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert {i: str(token) for i, token in ours.added_tokens_decoder.items()} == {
        i: str(token) for i, token in theirs.added_tokens_decoder.items()
    }
    for text in texts(theirs):
        for adds in (True, False):
            assert (
                ours(text, add_special_tokens=adds)["input_ids"] == theirs(text, add_special_tokens=adds)["input_ids"]
            )
    choice, plain, every = random.Random(3), {"clean_up_tokenization_spaces": False}, range(len(theirs))
    for _ in range(500):  # most end within a character
        ids = choice.choices(every, k=choice.randrange(1, 8))
        for skips in (True, False):
            assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips, **plain)
        piece = ours.convert_ids_to_tokens(ids[0])
        assert piece == theirs.convert_ids_to_tokens(ids[0])
        assert ours.convert_tokens_to_ids(str(piece)) == theirs.convert_tokens_to_ids(str(piece))
    assert ours.convert_ids_to_tokens(len(theirs) + 5) == theirs.convert_ids_to_tokens(len(theirs) + 5)
    assert ours.convert_tokens_to_ids("no token") == theirs.convert_tokens_to_ids("no token")


def test_it_is_equal_to_that_of_transformers(both: Both) -> None:
    check_equal(*both)


@pytest.mark.parametrize("most", [4 << 20, pytest.param(1 << 40, marks=pytest.mark.slow)])
def test_real_ones_are_equal_to_those_of_transformers(most: int) -> None:
    """most: bytes of those that are compared."""
    cached = [file for file in sorted(home().glob("gguf/*/tokenizer.json")) if file.stat().st_size < most]
    files = {file.read_bytes(): file for file in cached}  # each kind once
    if not files:
        pytest.skip("no model is in the cache: run talon models get smollm2-135m")
    for folder in (file.parent for file in files.values()):
        check_equal(*pair(AutoTokenizer.from_pretrained(folder, local_files_only=True)))


def test_llama_2s_is_equal_to_that_of_transformers(shared: Path) -> None:
    file = shared / "models" / "tokenizers" / "llama2" / "tokenizer.json"
    if not file.is_file():
        pytest.skip("no tokenizer of Llama 2 beside the benchmark data")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    check_equal(*pair(PreTrainedTokenizerFast(tokenizer_file=str(file), **named)))


def test_several_texts_are_encoded_together(both: Both) -> None:
    ours, theirs = both
    some = ["a", "", "a b"]
    assert ours(some, verbose=False)["input_ids"] == theirs(some, verbose=False)["input_ids"]
    ids = [[i] for i in range(len(theirs))]
    assert ours.batch_decode(ids) == theirs.batch_decode(ids, clean_up_tokenization_spaces=False)


def test_what_a_file_says_of_padding_and_cutting_is_not_done() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    ours, theirs = pair(tokenizer)
    assert len(ours("abcdef")["input_ids"]) == 6
    assert ours("abcdef")["input_ids"] == theirs("abcdef")["input_ids"]


def test_a_class_with_ways_of_its_own_is_left_to_transformers() -> None:
    class Other(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **options: Any) -> str:
            return "another text"

    assert state_of(Other(tokenizer_object=tiny_tokenizer().backend_tokenizer)) is None


def test_words_whose_spaces_transformers_removes_are_left_to_it() -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    assert state_of(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)) is None


def test_a_template_of_several_is_chosen_as_transformers_does() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    ours, theirs = pair(tokenizer)
    for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
        options: dict[str, Any] = {"tools": tools, "tokenize": False}
        messages = [{"role": "user", "content": "a"}]
        assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)
    tokenizer.chat_template = {"tool_use": "with tools"}
    with pytest.raises(ValueError, match="none of them the default"):
        pair(tokenizer)[0].apply_chat_template([{"role": "user", "content": "a"}])


def test_a_chat_becomes_the_same_tokens(both: Both) -> None:
    ours, theirs = both
    ours.chat_template = theirs.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a b"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, return_dict=False)
