"""Gemma 4's assistant: what it computes is what its class in transformers computes, and texts are plain decoding's."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from drafters.heads.assistant.head import AssistantHead
from drafters.heads.assistant.program import AssistantProgram
from drafters.heads.assistant.weights import TargetKeys, read_assistant
from drafters.parts import parts, weights_path
from engine import SamplingParams
from engine.config import load
from engine.core.errors import ConfigError, DrafterMismatch, ModelError
from engine.kernels.gemm.product import multiplies
from engine.model.target import Target
from engine.verifier.request import Request
from engine.weights.resolve import with_own
from tests.drafters.heads.assistant.tiny_assistant import WINDOW, random_assistant, save, write_assistant
from tests.drafters.heads.layouts.head_gguf import write_described
from tests.engine.tiny_engine import PROMPTS, tiny_engine
from tests.engine.tiny_families import build
from tests.engine.weights.family_gguf import random_model

pytestmark = [
    pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor"),
    pytest.mark.usefixtures("no_gradients"),
]
FAMILIES = ("gemma4", "gemma4 with inputs of layers", "gemma4 whose keys are values")
TEXT = [(7 * i) % 250 for i in range(40)]
NEXT = 77
_OF_BFLOAT16, _OF_8_BITS = 0.06, 0.15  # what rounding of rows, and of matrices, makes of three tokens


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("gemma4")


@pytest.fixture(scope="module")
def assistant(model: Any) -> Any:
    return random_assistant(model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Any, assistant: Any) -> dict[str, tuple[Path, Path]]:
    """The target and its assistant beside it, as directories and as files."""
    stored, files = tmp_path_factory.mktemp("stored"), tmp_path_factory.mktemp("files")
    return {
        "safetensors": (save(model, stored / "model"), save(assistant, stored / "model-assistant")),
        "gguf": (
            write_described(files, "gemma4", model).parent,
            write_assistant(files / "x-assistant.gguf", assistant),
        ),
    }


Keys = dict[str, tuple[Tensor, Tensor]]


class Reference:
    """The assistant in transformers, after a text that the target in transformers has read."""

    def __init__(self, target: Any, assistant: Any, text: list[int]):
        self.assistant, self.embed, self.position = assistant, target.model.embed_tokens, len(text)
        out = target(torch.tensor([text]), output_hidden_states=True, past_key_values=DynamicCache())
        self.states, self.keys = out.hidden_states[-1][0], keys_of(target.config, out.past_key_values)

    def __call__(self, path: list[int], keys: Keys | None = None) -> Tensor:
        """The logits after a path of tokens that follow the text."""
        state = self.states[None, -1:]
        for token in path:
            out = self.assistant(
                inputs_embeds=torch.cat([self.embed(torch.tensor([[token]])), state], dim=-1),
                position_ids=torch.tensor([[self.position]]),
                shared_kv_states=keys or self.keys,
            )
            state = out.last_hidden_state
        return out.logits[0, -1]

    def features(self, sizes: list[TargetKeys], keys: Keys | None = None) -> Tensor:
        """Return what the target gives: its states, then its keys and values in pieces as wide as a state."""
        found, hidden = keys or self.keys, self.states.shape[1]
        both = [part[0].transpose(0, 1).flatten(1) for size in sizes for part in found[size.kind]]
        numbers = torch.cat(both, dim=1)
        pieces = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % hidden)).unflatten(1, (-1, hidden))
        return torch.cat([self.states[:, None], pieces], dim=1).to(torch.bfloat16)


def keys_of(config: Any, cache: Any) -> Keys:
    """The keys and values of the last layer of each type that has its own. cache: one that keeps the whole text."""
    own = config.layer_types[: len(config.layer_types) - config.num_kv_shared_layers]
    last = {kind: at for at, kind in enumerate(own)}
    return {kind: (cache.layers[at].keys, cache.layers[at].values) for kind, at in last.items()}


def head_of(model: str, path: str, layers: int, vocabulary: int = 10**6) -> AssistantHead:
    return AssistantHead(read_assistant(model, path, vocabulary), layers)


def check_tree(head: AssistantHead, reference: Reference, most: float, narrow: bool = False) -> None:
    """Draft a chain with a sibling beside each node, and compare its logits with transformers'. most: the error of
    logits, relative to them.
    """
    session = head.open(TEXT, 64, 32)
    features = reference.features(head.weights.keys)
    half = len(features) // 2
    session.commit(0, features[:half], TEXT[1 : half + 1])
    session.commit(half, features[half:], [*TEXT[half + 1 :], NEXT])
    found, path, node = session.root_logits()[0], [NEXT], 0
    for _ in range(3):
        expected = reference(path)[head.target_ids]
        seen = expected > expected.min() + 0.5 if narrow else torch.ones(len(expected), dtype=torch.bool)
        assert float((found.float() - expected)[seen].std() / expected[seen].std()) < most
        if narrow:
            assert float(found[~seen].max()) < -1000
        token = int(head.target_ids[int(expected.argmax())])
        nodes, both = session.extend([node, node], [7, token])  # only the second goes on
        assert both is not None
        path, found, node = [*path, token], both[1], nodes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_and_its_siblings_get_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    target = random_model(family)
    assistant = random_assistant(target)
    reference = Reference(target, assistant, TEXT)
    folder, layers = str(save(target, tmp_path / "model")), target.config.num_hidden_layers
    check_tree(head_of(folder, str(save(assistant, tmp_path / "a")), layers), reference, _OF_8_BITS)
    file = str(write_assistant(tmp_path / "a.gguf", assistant, Kind.BF16))
    check_tree(head_of(folder, file, layers), reference, _OF_BFLOAT16)


def test_centroids_narrow_the_logits_as_in_transformers(model: Any, tmp_path: Path) -> None:
    assistant = random_assistant(model, ordered=True)
    folder, path = str(save(model, tmp_path / "model")), str(save(assistant, tmp_path / "a"))
    head = head_of(folder, path, model.config.num_hidden_layers)
    check_tree(head, Reference(model, assistant, TEXT), _OF_8_BITS, narrow=True)


def test_layers_with_a_window_see_the_keys_that_they_see_in_transformers(
    folders: dict[str, tuple[Path, Path]], model: Any, assistant: Any
) -> None:
    target, path = map(str, folders["safetensors"])
    head, reference = head_of(target, path, 6), Reference(model, assistant, TEXT)

    def ours(keys: Keys | None = None) -> Tensor:
        session = head.open(TEXT, 64, 32)
        session.commit(0, reference.features(head.weights.keys, keys), [*TEXT[1:], NEXT])
        return session.root_logits()[0]

    for back, seen in ((WINDOW + 1, True), (WINDOW + 2, False)):
        changed = {kind: (key.clone(), value.clone()) for kind, (key, value) in reference.keys.items()}
        changed["sliding_attention"][1][:, :, -back] += 100
        assert torch.equal(reference([NEXT]), reference([NEXT], changed)) != seen
        assert torch.equal(ours(), ours(changed)) != seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_gives_the_keys_and_values_that_transformers_shares(family: str, dtype: str) -> None:
    made = build(family, dtype)
    target = Target.of_model(made, family, kv_memory=1 << 22)
    most = 1e-4 if dtype == "float32" else 0.05  # of what six layers round otherwise than transformers'
    layers, text = target.layers, [token % made.config.vocab_size for token in TEXT]
    wanted = (layers, *range(layers + 1, layers + 1 + target.key_pieces))
    cache = target.new_cache(64)
    _, features = target.prefill(cache, text, wanted)
    assert features is not None
    out = made(torch.tensor([text]), output_hidden_states=True, past_key_values=DynamicCache())
    keys = keys_of(made.config, out.past_key_values)
    own = made.config.layer_types[: layers - made.config.num_kv_shared_layers]
    kinds = sorted(keys, key=lambda kind: len(own) - own[::-1].index(kind))
    both = torch.cat([part[0].transpose(0, 1).flatten(1) for kind in kinds for part in keys[kind]], dim=1)
    given = features[:, 1:].flatten(1).float()
    assert not given[:, both.shape[1] :].any()
    error = given[:, : both.shape[1]] - both.float()
    assert float(error.std() / both.float().std()) < most
    expected = out.hidden_states[-1][0].float()
    assert float((features[:, 0].float() - expected).std() / expected.std()) < most


def test_keys_in_8_bits_are_given_as_numbers() -> None:
    made = build("gemma4", "bfloat16")
    given = []
    for kind in ("auto", "q8_0"):
        target = Target.of_model(made, "gemma4", kv_memory=1 << 22, kv_type=kind)
        assert (target.kv_type == "q8_0") == (kind == "q8_0")
        _, features = target.prefill(target.new_cache(64), TEXT[:5], (target.layers + 1,))
        assert features is not None
        given.append(features.float())
    assert 0 < float((given[0] - given[1]).std() / given[0].std()) < 0.05


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
async def test_texts_that_an_assistant_drafts_are_those_of_plain_decoding_alone_and_at_once(
    folders: dict[str, tuple[Path, Path]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = folders[kind]
    asked = [
        (prompt, SamplingParams(max_tokens=24, temperature=temperature, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 1.0)
    ]
    texts, done, of_five_blocks = {}, Counter[str](), {"safetensors": 190_000, "gguf": 130_000}[kind]
    for kind_of, name in ((AssistantProgram, "step"), (Request, "preempt")):
        monkeypatch.setattr(kind_of, name, counted(getattr(kind_of, name), done))
    for name, memory in (
        ("none", 1 << 24),
        ("assistant", 1 << 24),
        ("hybrid", 1 << 24),
        ("assistant in need", of_five_blocks),
    ):
        named = "auto" if name == "hybrid" else str(path)  # it lies beside the model
        options: dict[str, Any] = {"method": name.split()[0], "drafter.path": named, "verifier.cut": False}
        done.clear()
        async with tiny_engine(str(target), "", **options | {"verifier.kv_memory": memory}) as engine:
            alone = [await engine.generate(*one) for one in asked]
            at_once = await asyncio.gather(*(engine.generate(*one) for one in asked))
            assert engine.target.head == ("" if name == "none" else "assistant")
        texts[name] = [result.token_ids for result in [*alone, *at_once]]
        assert all(result.metrics.exact for result in [*alone, *at_once])
        assert (done["step"] > 10) == (name != "none") and (done["preempt"] > 0) == (memory < 1 << 24)
    assert all(text == texts["none"] for text in texts.values())


def counted(method: Callable[..., Any], done: Counter[str]) -> Callable[..., Any]:
    """The method, whose calls are counted under its name."""

    def call(*given: Any) -> Any:
        done[method.__name__] += 1
        return method(*given)

    return call


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_an_assistant_beside_its_model_is_taken_by_itself(folders: dict[str, tuple[Path, Path]], kind: str) -> None:
    target, path = folders[kind]
    for model in (target, target / "x.gguf") if kind == "gguf" else (target,):
        merged = with_own(load({"model": str(model), "method": "hybrid"}))
        assert parts(merged) == ("assistant", "suffix") and weights_path(merged) == str(path)
        alone = with_own(load({"model": str(model), "method": "assistant"}))
        assert weights_path(alone) == str(path)
        other = with_own(load({"model": str(model), "method": "hybrid", "drafter": {"head": "eagle3"}}))
        assert other.drafter.path is None and parts(other) == ("eagle3", "suffix")
        assert with_own(load({"model": str(model), "method": "suffix"})).drafter.path is None


def test_a_file_beside_that_is_for_another_model_is_passed_over(tmp_path: Path, model: Any, assistant: Any) -> None:
    write_described(tmp_path, "gemma4", model)
    write_assistant(tmp_path / "a.gguf", assistant, changes={"embedding_length_out": 128})
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert with_own(load({"model": str(tmp_path), "method": "hybrid"})).drafter.path is None
    with pytest.raises(ConfigError, match=r"drafter.path: method assistant needs the model's assistant"):
        weights_path(with_own(load({"model": str(tmp_path), "method": "assistant"})))


def test_the_drafted_vocabulary_is_trimmed_and_takes_the_tokens_of_texts(
    folders: dict[str, tuple[Path, Path]], model: Any, assistant: Any
) -> None:
    target, path = map(str, folders["gguf"])
    head, reference = head_of(target, path, 6, vocabulary=100), Reference(model, assistant, TEXT)
    assert len(head.target_ids) == 100 and 250 not in head.target_ids.tolist()
    session = head.open(TEXT, 64, 32)
    session.commit(0, reference.features(head.weights.keys), [*TEXT[1:], 250])
    assert session.root_logits().shape == (1, 100) and 250 in head.target_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"backbone_hidden_size": 96}, "backbone_hidden_size 96 != the target's 64"),
        ({"vocab_size": 288}, "vocab_size 288 != the target's 262"),
        ({"head_dim": 32}, "head_dim of sliding_attention 32 != the target's 16"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is no multiple of the target's 2 heads of keys"),
    ],
)
def test_an_assistant_of_another_model_is_refused_with_the_field(
    changes: dict[str, Any], problem: str, folders: dict[str, tuple[Path, Path]], model: Any, tmp_path: Path
) -> None:
    other = random_assistant(model, **changes)
    for path in (save(other, tmp_path / "a"), write_assistant(tmp_path / "a.gguf", other)):
        with pytest.raises(DrafterMismatch, match=problem) as error:
            read_assistant(str(folders["gguf"][0]), str(path), 100)
        assert str(error.value).startswith(f"drafter.path={path}: ") and "\n" not in str(error.value)


SHAPES = r"tensor blk.0.attn_q.weight has shape \[64, 32\], not \[32, 32\]"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        *(
            ({"without": name}, f"tensor {name} is missing")
            for name in ("blk.1.attn_q.weight", "nextn.pre_projection.weight", "output_norm.weight")
        ),
        ({"changes": {"attention.head_count": 2}}, SHAPES),
        ({"changes": {"embedding_length_out": None}}, "gemma4-assistant.embedding_length_out: None is not a positive"),
        ({"changes": {"attention.sliding_window_pattern": None}}, "its metadata describe no assistant"),
        ({"changes": {"attention.sliding_window_pattern": [True]}}, "its metadata describe no assistant"),
    ],
)
def test_a_file_that_lacks_a_part_of_an_assistant_is_refused_before_a_kernel_reads_it(
    options: dict[str, Any], problem: str, folders: dict[str, tuple[Path, Path]], assistant: Any, tmp_path: Path
) -> None:
    file = write_assistant(tmp_path / "a.gguf", assistant, **options)
    with pytest.raises(ModelError, match=f"drafter.path=.*a.gguf: .*{problem}"):
        read_assistant(str(folders["gguf"][0]), str(file), 100)


def test_a_tensor_of_another_shape_is_refused_before_a_kernel_reads_it(
    folders: dict[str, tuple[Path, Path]], model: Any, assistant: Any, tmp_path: Path
) -> None:
    target = str(folders["gguf"][0])
    wrong = save(assistant, tmp_path / "a")
    tensors = load_file(wrong / "model.safetensors") | {"post_projection.weight": torch.zeros(64, 16)}
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor post_projection.weight has shape \[64, 16\], not \[64, 32\]"):
        read_assistant(target, str(wrong), 100)
    odd = write_assistant(tmp_path / "b.gguf", random_assistant(model, intermediate_size=40))
    with pytest.raises(ModelError, match="intermediate_size=40 is not supported, multiples of 16 are"):
        read_assistant(target, str(odd), 100)


def test_positions_that_rotate_more_than_a_head_are_refused_before_a_kernel_reads_them(
    folders: dict[str, tuple[Path, Path]], assistant: Any, tmp_path: Path
) -> None:
    wrong = save(assistant, tmp_path / "a")
    config = json.loads((wrong / "config.json").read_text())
    config["text_config"]["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 2.0
    (wrong / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rope_parameters rotate more dimensions than a head has"):
        read_assistant(str(folders["gguf"][0]), str(wrong), 100)


def test_files_that_hold_no_assistant_and_targets_of_another_family_are_refused_in_one_line(
    folders: dict[str, tuple[Path, Path]], assistant: Any, tmp_path: Path, tiny: str
) -> None:
    target, path = folders["gguf"]
    with pytest.raises(DrafterMismatch, match="the target is of type llama, and an assistant is Gemma 4's"):
        read_assistant(tiny, str(path), 100)
    with pytest.raises(ModelError, match=r"general.architecture is 'gemma4', which is no gemma4-assistant"):
        read_assistant(str(target), str(target / "x.gguf"), 100)
    with pytest.raises(ModelError, match="model_type='gemma4_text' is none of gemma4_assistant"):
        read_assistant(str(target), str(folders["safetensors"][0]), 100)
    (tmp_path / "a.gguf").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short"):
        read_assistant(str(target), str(tmp_path / "a.gguf"), 100)
    wrong = save(assistant, tmp_path / "a")
    (wrong / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        read_assistant(str(target), str(wrong), 100)


def test_a_target_that_does_not_run_lean_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = save(build("phi with norms of heads", "float32"), tmp_path / "phi")
    for method, options in (("assistant", {}), ("hybrid", {"drafter.head": "assistant"})):
        config = load({"model": str(folder), "method": method, "verifier": {"kv_memory": 1 << 22}}, options)
        with pytest.raises(ConfigError, match="only the lean decoder gives, and this target does not run on it"):
            Target.of_config(config)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0, Kind.Q8_0])
def test_matrices_lie_in_memory_in_the_files_bits(
    kind: Kind, folders: dict[str, tuple[Path, Path]], assistant: Any, tmp_path: Path
) -> None:
    file = write_assistant(tmp_path / "a.gguf", assistant, kind)
    weights = read_assistant(str(folders["gguf"][0]), str(file), 100)
    assert weights.before.matmul is not None
    [tiled] = weights.before.matmul.tiled
    assert tiled.layout.kind.startswith({Kind.F16: "BF16"}.get(kind, kind.name))
