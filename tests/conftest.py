"""Tiny real models, built once per session: nothing is downloaded and nothing beside the repository is needed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# read when torch is imported: threads of one test would spin for a core that another test's process has
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
import torch

# hundreds of workers would otherwise each compile every source that they import
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing has done yet
from hypothesis import Phase, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.weights.catalogue import find
from engine.weights.gguf.file import read_gguf
from engine.weights.resolve import folder_of
from retrieval_index.build import build
from tests.forked_process import fork_workers

settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, deadline=None)
settings.register_profile("any machine", deadline=None)  # a shared machine may stall in any example
settings.load_profile("any machine")
torch.set_num_threads(1)  # what fixtures of the session compute, too

VOCABULARY = 260
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""The sizes of a target with grouped-query attention."""
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(end: str = "<|end|>") -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and four special ones: 0 end, 1 user, 2 assistant, 3 unused."""
    special = [end, "<|user|>", "<|assistant|>", "<|unused|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token=end,
        extra_special_tokens=special[1:],
        chat_template=TEMPLATE,
    )


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with the space before them, bytes for all else, and a beginning-of-sequence token, as
    Llama 2 has.
    """
    pieces = ["<s>", "\u2581", "a", "\u2581a", "\u2581world", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    space = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def save_tiny_llama(folder: Path, **changes: Any) -> str:
    """Save a random Llama with grouped-query attention, and the tiny tokenizer, as a Hugging Face directory."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY | changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def free_port() -> int:
    """Return a tcp port that nobody has bound."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a target."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the same target in a form that starts in half of the time, for tests that start many processes."""
    from tests.engine.weights.tiny_gguf import save_tiny_gguf

    return save_tiny_gguf(tmp_path_factory.mktemp("tiny-gguf"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a draft model of the target's first two layers, which often agree with it, and a datastore."""
    folder = tmp_path_factory.mktemp("tiny-draft")
    model = LlamaForCausalLM.from_pretrained(save_tiny_llama(folder))
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(folder)
    (folder / "corpus.txt").write_text("the cat sat on the mat, 1 + 1 = 2. the cat sat on the hat, 1 + 2 = 3.")
    build(tiny_tokenizer(), [folder / "corpus.txt"], folder / "datastore")
    return str(folder)


@pytest.fixture(scope="session")
def tiny_stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model of another vocabulary: bytes come before the special tokens."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny-stranger"), vocab_size=300)
    file = Path(folder) / "tokenizer.json"
    told = json.loads(file.read_text("utf8"))
    told["model"]["vocab"] = {token: (i - 4) % VOCABULARY for token, i in told["model"]["vocab"].items()}
    for added in told["added_tokens"]:
        added["id"] = (added["id"] - 4) % VOCABULARY
    file.write_text(json.dumps(told), "utf8")
    return folder


@pytest.fixture
def describes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe GGUF files in this process: one of its own, which does it usually, imports for seconds."""
    from engine.weights import resolve
    from engine.weights.gguf import described_folder
    from engine.weights.gguf.describe_process import describe

    def make(file: Path, folder: Path, field: str, title: str, origin: str, report: object) -> None:
        describe(read_gguf(file, field), folder, title, origin)

    monkeypatch.setattr(described_folder, "describe", make)
    monkeypatch.setattr(resolve, "describe", make)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of benchmark data beside the repository."""
    folder = Path(os.environ.get("TALON_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip("no benchmark data: set TALON_SHARED to its folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the real model, where it is installed."""
    folder = folder_of(find("smollm2-135m"))
    if not folder.is_dir():
        pytest.skip("smollm2-135m is not there: run talon models get smollm2-135m")
    return str(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread, however many a test has taken before."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """Compute as workers do, without gradients."""
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of engines. Tests of how processes start, slow ones and those of a GPU start whole ones."""
    if not request.node.nodeid.startswith(FRONT_END) and not {"slow", "gpu"} & {*request.node.keywords}:
        fork_workers(monkeypatch)


FRONT_END = "tests/engine/frontend/"
SERVERS = "tests/engine/server/"
TOGETHER = (SERVERS, "tests/drafters/learning/")
"""Folders whose files share servers, or a head."""
KERNELS = ("tests/engine/kernels/quant/", "tests/engine/kernels/attention/")
STARTS = ("tests/faults/", "tests/test_", "tests/engine/weights/", FRONT_END, "tests/engine/cli/")
LONG = (SERVERS, *KERNELS, "tests/engine/model/cuda/test_cuda_", *STARTS)
"""What begins first: whole folders of one process, the longest files, and files whose tests start processes."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule as `--dist loadfile`, with the files that share servers, or a head, as one: else each process would make
    its own.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next(filter(nodeid.startswith, TOGETHER), None) or str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, or one process would work on them at the end alone. Tests that take minutes by their nature
    are not ended for it.
    """
    items.sort(key=lambda item: next((at for at, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG)))
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))
