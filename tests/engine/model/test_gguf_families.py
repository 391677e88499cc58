"""GGUF files of the families that the lean decoder runs: the model is that of transformers, and its bits are exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.core.batch import Segment
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.gemm.product import multiplies
from engine.kernels.layer.weights import ExpertMlp
from engine.model.decoder import LeanDecoder
from engine.model.loading import load_config, load_model, skeleton, weights_of
from engine.model.target import Target
from engine.model.trial.stock_logits import LayeredStock, Offsets, WholeStock, passed_rules
from engine.model.trial.windows import short_windows
from engine.weights.gguf.source import open_gguf
from engine.weights.gguf.weights import GgufWeights
from tests.engine.test_exact import decoded, read, with_siblings
from tests.engine.weights.family_gguf import random_model, write_family
from tests.engine.weights.family_table import FAMILIES
from tests.engine.weights.tiny_gguf import TOKENS, described_gguf

pytestmark = [
    pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor"),
    pytest.mark.usefixtures("no_gradients"),
]
LEAN = sorted(FAMILIES)
EXPERTS = ["qwen3 with experts", "mixtral", "gpt-oss", "granite 4 with experts", "nemotron 3 with experts"]
EXPERTS += ["deepseek v3"]  # whose heads have products of their own too
TEXT = random.Random(1).choices(range(len(TOKENS)), k=48)
every_family = pytest.mark.parametrize("family", LEAN)
OF_A_KIND = ["llama", "gemma2", "gemma4 with inputs of layers", "lfm2", "qwen3.5", "falcon-h1", "kimi linear"]
some_families = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.slow] * (one not in [*EXPERTS, *OF_A_KIND])) for one in LEAN]
)
"""Each kind of layer in blocks of a file; of the others the trial compares rows, and tests of the numbers do."""


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write a random model of a family as GGUF and describe it; its directory."""

    @cache
    def make(family: str, kind: Kind = Kind.Q8_0) -> str:
        folder = tmp_path_factory.mktemp("family")
        write_family(folder / "x.gguf", family, random_model(family), kind)
        return described_gguf(folder / "x.gguf")

    return make


@pytest.fixture(scope="module")
def target_of(described: Callable[..., str]) -> Callable[[str], Target]:
    @cache
    def load(family: str) -> Target:
        torch.set_num_threads(2)
        target = Target.load(described(family), kv_memory=1 << 22)
        torch.set_num_threads(1)
        return target

    return load


@every_family
def test_the_described_model_computes_what_the_original_does(described: Callable[..., str], family: str) -> None:
    original = random_model(family)
    folder = described(family, Kind.F32)
    gguf = open_gguf(Path(folder))
    assert gguf is not None
    weights = weights_of(gguf, skeleton(folder, load_config(folder)))
    theirs = original.state_dict()
    values = {name: weights.values(name).float() for name in theirs}
    for name, value in values.items():
        error = 1e-6 if name.endswith("A_log") else 0  # its exponential is stored
        torch.testing.assert_close(value, theirs[name], rtol=error, atol=error)
    copy = AutoModelForCausalLM.from_config(load_config(folder), dtype=torch.float32).eval()
    copy.load_state_dict(values, strict=False)
    copy.tie_weights()
    for start in (0, 300):
        places = torch.arange(start, start + len(TEXT))[None]
        ours, expected = (each(torch.tensor([TEXT]), position_ids=places).logits for each in (copy, original))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_the_stock_forward_of_a_file_reads_a_weight_once_for_all_texts(
    described: Callable[..., str], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short windows and far positions included, with the logits and rules of the model in memory."""
    folder = described(family)
    gguf, model = open_gguf(Path(folder)), skeleton(folder, load_config(folder))
    assert gguf is not None
    weights = weights_of(gguf, model)
    weights.fill_small(model)
    layered, read_names, usual = LayeredStock(model, weights), list[str](), weights.values
    monkeypatch.setattr(weights, "values", lambda name: read_names.append(name) or usual(name))
    text = random.Random(1).choices(range(len(TOKENS)), k=48)
    offsets = [Offsets(), Offsets(200, 200), Offsets(0, 400)]
    found = layered(text, offsets, 20, beyond=True)
    assert sorted(read_names) == [name for name, _ in sorted(model.named_parameters()) if ".layers." in name]
    whole = load_model(folder, "auto", torch.device("cpu"))
    expected = WholeStock(whole, family)(text, offsets, 20, beyond=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape == (28, len(TOKENS))
        error = (ours - theirs).pow(2).mean(1).median().sqrt()  # rounding may choose other experts
        assert error <= 0.05 * theirs.std()
    assert (found[-1] - found[0]).pow(2).mean(1).median().sqrt() > 0.1 * found[0].std(), "windows matter"
    rules = [passed_rules(whole)]
    with short_windows(whole.config):
        rules.append(passed_rules(whole))
    for ours_of, theirs_of in zip(layered.passed, rules, strict=True):
        for layer, rule in theirs_of.items():
            assert (ours_of[layer].scale, ours_of[layer].window) == (rule.scale, rule.window)
    assert layered.passed[0][0].window != layered.passed[1][0].window


@every_family
def test_a_file_runs_on_the_lean_decoder_and_is_exact(target_of: Callable[[str], Target], family: str) -> None:
    target = target_of(family)
    assert isinstance(target.forward, LeanDecoder) and target.exact and not target.stock_reason
    assert target.weights == "q8_0"  # in the file's bits, and not as the stock model's numbers
    experts = [mlp for layer in target.forward.layers if isinstance(mlp := layer.weights.mlp, ExpertMlp)]
    assert all(product.coded for mlp in experts for product in [*mlp.gate_up, *mlp.down])
    assert experts or family not in EXPERTS


@some_families
def test_rows_have_the_bits_that_they_have_alone(target_of: Callable[[str], Target], family: str) -> None:
    target = target_of(family)
    alone = read(target, TEXT, 1)
    tree, spine = with_siblings(TEXT[30], TEXT[31:40], random.Random(2))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(torch.equal(read(target, TEXT, chunk), alone) for chunk in (7, len(TEXT)))
        held = target.new_cache(len(TEXT) + len(tree))
        target.prefill(held, TEXT[:30])
        assert torch.equal(target.run([Segment.of_tree(tree, held)])[0][spine], alone[30:40])
        target.release(held)


@pytest.mark.parametrize("family", ["mixtral", "kimi linear"])
def test_drafted_text_is_plain_text(target_of: Callable[[str], Target], family: str) -> None:
    sampling = SamplingParams(max_tokens=32, temperature=1.0, seed=5)
    plain = decoded(target_of(family), TEXT[:20], sampling)
    assert decoded(target_of(family), TEXT[:20], sampling, plain) == plain


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, id=f"{family}-{kind.name}", marks=[pytest.mark.slow] * ((number - at) % 2))
        for number, family in enumerate(EXPERTS)
        for at, kind in enumerate((Kind.Q4_1, Kind.F32))
    ],
)
def test_experts_have_one_set_of_bits_in_batches_of_many_rows(
    described: Callable[..., str], family: str, kind: Kind
) -> None:
    """There are enough rows for threads to share what they compute of an expert's rows."""
    target = Target.load(described(family, kind), kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder) and target.exact
    rng = random.Random(3)
    text = [rng.randrange(len(TOKENS)) for _ in range(200)]
    expected = read(target, text, 1)
    torch.set_num_threads(2)
    for _ in range(3):
        assert all(torch.equal(read(target, text, chunk), expected) for chunk in (64, 200))


@pytest.mark.parametrize("family", [pytest.param(one, marks=[pytest.mark.slow] * (one not in EXPERTS)) for one in LEAN])
def test_rows_are_rounded_to_8_bits_where_that_is_wanted(described: Callable[..., str], family: str) -> None:
    target = Target.load(described(family), kv_memory=1 << 22, activations="int8")
    assert isinstance(target.forward, LeanDecoder) and target.exact and target.activations == "int8"
    torch.set_num_threads(2)
    assert torch.equal(read(target, TEXT, 1), read(target, TEXT, len(TEXT)))


def test_experts_whose_projections_are_of_two_types_have_the_logits_of_their_numbers(
    described: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, folder = GgufWeights.experts, described("mixtral")

    def logits_of(coded: int) -> Tensor:
        """Return the logits of a model of which only the first parts are in codes."""

        def experts(self: GgufWeights, name: str, parts: int = 0) -> Any:
            found = usual(self, name, parts)
            of_numbers = type(found[0][0]).of_numbers
            return [[*parts[:coded], *(of_numbers(part.values()) for part in parts[coded:])] for parts in found]

        monkeypatch.setattr(GgufWeights, "experts", experts)
        (Path(folder) / "proof-bfloat16.msgpack").unlink(missing_ok=True)
        target = Target.load(folder, kv_memory=1 << 22)
        assert isinstance(target.forward, LeanDecoder) and target.exact
        return read(target, TEXT, 7)

    found, expected = logits_of(1), logits_of(0)
    if units()[0] is Unit.AMX:
        assert torch.equal(found, expected)
    else:
        assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen3.5", {"block_count": 3}, "qwen35.block_count is 3, and its tensors are of 4"),
        ("qwen3.5", {"ssm.time_step_rank": 5}, "qwen35.ssm.time_step_rank is 5: value heads are no multiple of the"),
        ("qwen3.5", {"attention.recurrent_layers": [True] * 3}, "qwen35.attention.recurrent_layers is of 3 layers"),
        ("gemma3", {"attention.sliding_window_pattern": [True] * 3}, "gemma3.attention.sliding_window_pattern is of 3"),
        ("gemma2", {"rope.freq_base_swa": 20_000.0}, "gemma2.rope.freq_base_swa: two bases of positions"),
        ("granite", {"attention.head_count_kv": [2, 1, 2]}, "granite.attention.head_count_kv is not the same in all"),
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is false: a Granite without"),
        ("granite", {"rope.dimension_count": 8}, "granite.rope.dimension_count is 8, and a head has 16"),
        (
            "granite 4",
            {"rope.scaling.finetuned": True, "rope.dimension_count": 8},
            "granitehybrid.rope.dimension_count is 8, and a head has 16",
        ),
        ("granite 4", {"ssm.inner_size": 100}, "granitehybrid.ssm.inner_size is 100, no multiple of 8"),
        ("granite 4", {"ssm.inner_size": 96}, "granitehybrid.ssm.inner_size is 96, no multiple of embedding_length"),
        ("granite 4", {"ssm.group_count": 3}, "granitehybrid.ssm.time_step_rank is 8, no multiple of 3"),
        ("granite 4", {"ssm.state_size": None}, "granitehybrid.ssm.state_size is missing or no positive number"),
        ("granite 4", {"attention.head_count_kv": [0, 2]}, "granitehybrid.attention.head_count_kv does not say which"),
        ("nemotron-h", {"feed_forward_length": [0, 96]}, "nemotron_h.feed_forward_length is not of 5 layers"),
        ("nemotron 3 with experts", {"nextn_predict_layers": 1}, "nemotron_h_moe.nextn_predict_layers: a draft head"),
    ],
)
def test_a_file_that_contradicts_itself_or_is_not_read_is_refused_with_the_field(
    family: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_family(tmp_path / "x.gguf", family, random_model(family), changes=changes)
    with pytest.raises(ModelError, match=problem):
        described_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("family", ["qwen3.5", "granite 4"])
def test_a_hybrid_whose_positions_are_scaled_is_refused_with_the_kind(family: str, tmp_path: Path) -> None:
    changes = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    write_family(tmp_path / "x.gguf", family, random_model(family), changes=changes)
    with pytest.raises(ModelError, match=r"^its scaling of positions \('yarn'\) is not read from GGUF$"):
        described_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5 with experts", "qwen3-next"])
def test_a_hybrids_file_may_name_its_recurrent_layers_in_place_of_an_interval(family: str, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    named = {"full_attention_interval": None, "attention.recurrent_layers": [True, False, False, True]}
    write_family(tmp_path / "x.gguf", family, random_model(family, layer_types=kinds), changes=named)
    target = Target.load(described_gguf(tmp_path / "x.gguf"), kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder) and [*target.forward.structure.attending] == [1, 2]


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5 with experts"])
def test_every_fourth_layer_attends_where_a_hybrids_file_names_none(family: str, tmp_path: Path) -> None:
    write_family(tmp_path / "x.gguf", family, random_model(family), changes={"full_attention_interval": None})
    config = load_config(described_gguf(tmp_path / "x.gguf"))
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]


def test_a_gemma_3_whose_file_names_no_window_has_none(described: Callable[..., str]) -> None:
    assert load_config(described("gemma3 without windows")).layer_types == ["full_attention"] * 3
