"""Training: resumable answers and runs, checkpoints in the public layout, acceptance that rises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.feature_head import FeatureHead, FeatureSession
from drafters.heads.growth.policies import Adaptive
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.hydra import HydraHead
from drafters.heads.medusa import MedusaHead
from drafters.heads.one_pass.block import BlockHead
from drafters.heads.pooled_session import PooledSession
from drafters.small_model import SmallModel
from drafters.training import answers as answers_module
from drafters.training import trainer as trainer_module
from drafters.training.answers import Example, answer_prompts, read_training_prompts
from drafters.training.build import build
from drafters.training.features import FeatureSource, KeptFeatures, kept_states
from drafters.training.head_module import Texts
from drafters.training.loss import Teacher
from drafters.training.recipe import Recipe
from drafters.training.run import export
from drafters.training.score import Score
from drafters.training.target import load_target
from drafters.training.trainer import Trainer, draft_vocabulary, held_apart
from engine.core.drafter_protocol import Verdict
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from tests.drafters.conftest import LAYERS, LLAMA, VOCAB
from tests.drafters.training.conftest import METHODS, SMALL, Training, weights

LOADERS = {
    "block": BlockHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": MedusaHead,
    "hydra": HydraHead,
    "sps": SmallModel,
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_killed_and_resumed_ends_with_the_same_weights(
    method: str, trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"feature_noise": 0.1, "known_share": 0.5}
    trained(method, "whole", plan=plan)
    step, calls = Trainer.train_step, []

    def dies(self: Trainer) -> Any:
        calls.append(self.step)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", dies)
        trained(method, "cut", plan=plan, save_minutes=0)
    trained(method, "cut", plan=plan, resume=True)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(whole[name].equal(cut[name]) for name in whole)


def test_answers_are_generated_once_and_a_cut_off_line_is_generated_again(
    trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("medusa", "one")
    [cache] = (tmp_path / "answers").glob("answers-*")
    complete = cache.read_bytes()
    lines = complete.splitlines(keepends=True)
    cache.write_bytes(b"".join(lines[:8]) + lines[8][:10])
    generated = []
    generate = answers_module.generate
    monkeypatch.setattr(
        answers_module,
        "generate",
        lambda model, batch, *rest, **kw: generated.append(len(batch)) or generate(model, batch, *rest, **kw),
    )
    trained("hydra", "two")
    assert generated == [4]  # of twelve prompts eight were left
    assert sorted(cache.read_bytes().splitlines()) == sorted(complete.splitlines())


def test_a_batched_answer_is_the_targets_own_greedy_continuation(chatty: Path, tmp_path: Path) -> None:
    model, tokenizer = load_target(chatty, "cpu")
    prompts = {"one": [1, 5, 6, 2], "two": [1, 9, 2]}
    sampling = SamplingParams(max_tokens=6)
    answers = answer_prompts(model, tokenizer, prompts, tmp_path / "a", "chatty", sampling, 2)
    for text, prompt in prompts.items():
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 6 and (len(tokens) == len(prompt) or tokens[-1] != 3):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answers[text] == tokens[len(prompt) :]


def copying_target() -> tuple[Any, list[Example]]:
    """A target and texts that run through a fixed cycle of tokens: easy to foresee."""
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=LAYERS, tie_word_embeddings=True)).eval()
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = torch.stack([(torch.arange(24) * 7 + start) % VOCAB for start in range(VOCAB)])
    for step in range(80):
        batch = texts[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(step))[:16]]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False), [Example(text.tolist(), 4) for text in texts]


@pytest.fixture(scope="module")
def copying() -> tuple[Any, list[Example]]:
    return copying_target()


@pytest.mark.parametrize("method", METHODS)
def test_held_out_acceptance_rises_at_every_position(method: str, copying: tuple[Any, list[Example]]) -> None:
    model, examples = copying
    changes = {
        "steps": 180 if method == "block" else 60,
        "batch": 8,
        "held_out": 8,
        "unroll": 3,
        "warmup": 5,
        "lr": 5e-3,
        "logit_weight": 1.0,
    }
    plan = Recipe(method=method, **{**SMALL, **changes})  # type: ignore[arg-type]
    trainer = Trainer(plan, model, build(plan, model, torch.arange(VOCAB)), FeatureSource(model, examples))
    before = trainer.evaluate().acceptance()
    while trainer.step < plan.steps:
        trainer.train_step()
    after = trainer.evaluate().acceptance()
    assert all(late > early + 0.2 for early, late in zip(before[:3], after[:3], strict=True)), (before, after)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_training_and_drafting_compute_the_same_logits(
    method: str, copying: tuple[Any, list[Example]], tmp_path: Path
) -> None:
    """The unrolled steps of a row are what the draft cache computes along a path behind it."""
    model, examples = copying
    plan = Recipe(method=method, **SMALL)  # type: ignore[arg-type]
    module = build(plan, model, draft_vocabulary(examples, 40, VOCAB))
    trainer = Trainer(plan, model, module, FeatureSource(model, examples))
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as exported
    export(module, tmp_path)
    weight = model.get_input_embeddings().weight.data
    head = LOADERS[method].load(str(tmp_path), TargetWeights(weight, weight, LAYERS))
    assert isinstance(head, FeatureHead)
    tokens = examples[3].tokens[:12]
    hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.stack([hidden[layer] for layer in trainer.states[:-1]], dim=2)
    row, steps = 6, 4
    texts = Texts(
        features[:, :-1], torch.tensor([tokens]), weight[tokens][None], torch.tensor([[row]]), torch.zeros(1, 1)
    )
    session = head.open([], 20, 10)
    assert isinstance(session, FeatureSession | PooledSession)
    session.commit(0, features[0, : row + 1], tokens[1 : row + 2])
    node, logits = 0, session.root()
    with torch.no_grad():
        for step, (states, _) in enumerate(module.draft(texts, steps)):
            expected = sum(x @ w.T for x, w in module.factors(states[0], step, torch.tensor([tokens[row + 1 + step]])))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            [node], logits = session.extend([node], [tokens[row + 2 + step]])


def biased_target() -> Any:
    """A target whose products of queries and keys have biases, and whose norms have weights."""
    torch.manual_seed(3)
    sizes = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "attention_bias")}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=LAYERS, tie_word_embeddings=True)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.requires_grad_(False)


@torch.inference_mode()
@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_a_block_is_drafted_as_it_was_trained(
    biased: bool, known: int, copying: tuple[Any, list[Example]], tmp_path: Path
) -> None:
    model, examples = copying
    model = biased_target() if biased else model
    plan = Recipe(method="block", **{**SMALL, "unroll": 5, "known_share": 0.5})
    module = build(plan, model, draft_vocabulary(examples, 40, VOCAB))
    trainer = Trainer(plan, model, module, FeatureSource(model, examples))
    trainer.optimizer.zero_grad()
    for parameter in module.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    export(module, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["markov_head.markov_w1.weight"] = module.markov_head.export()["markov_w1.weight"]  # not rounded to bfloat16
    save_file(stored, tmp_path / "model.safetensors")
    weight = model.get_input_embeddings().weight.data
    head = BlockHead.load(str(tmp_path), TargetWeights(weight, weight, LAYERS))
    tokens, row = examples[3].tokens[:14], 6
    hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.stack([hidden[layer] for layer in trainer.states[:-1]], dim=2)
    anchors, given = torch.tensor([[2, row]]), torch.tensor([[0, known]])
    texts = Texts(features[:, :-1], torch.tensor([tokens]), weight[tokens][None], anchors, given)
    session = head.open([], 20, 10)
    session.commit(0, features[0, : row + 1], tokens[1 : row + 2])
    head.begin([(session, [tokens[row + 2 : row + 2 + known]])])
    for step, (states, _) in enumerate(module.draft(texts, 5)):
        if step < known:
            continue  # what a row predicts that is known is not computed
        at = session.blocks[-1].row + step - known
        logits, gates, _ = (part[at : at + 1] for part in session.blocks[-1].forward.outputs)
        previous = tokens[row + 1 + step]
        [(state, output), (link, second)] = module.factors(states[0, 1:], step, torch.tensor([previous]))
        torch.testing.assert_close(logits, state @ output.T, atol=1e-4, rtol=1e-4)
        gate = torch.sigmoid(gates + head.link.gate.of_token[previous])
        linked = link @ second.T  # what it adds to all tokens alike changes no probability
        linked = linked - linked.mean()
        torch.testing.assert_close(gate * head.link.first[previous] @ head.link.second.T, linked, atol=1e-5, rtol=1e-4)


def test_features_kept_in_memory_or_on_disk_are_those_computed_anew(
    copying: tuple[Any, list[Example]], tmp_path: Path
) -> None:
    model, examples = copying
    examples = [Example(example.tokens[: 9 + i], 4) for i, example in enumerate(examples[:6])]
    states, fresh = kept_states(LAYERS), FeatureSource(model, examples)
    held, stored = KeptFeatures(model, examples, (2, 6)), KeptFeatures(model, examples, states, tmp_path)
    for kept in (held, stored):
        for chosen in ([0, 3], [3, 4, 1]):
            for one, other in zip(kept.read(chosen, (2, 6)), fresh.read(chosen, (2, 6)), strict=True):
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    assert held.read([5], (6,))[0].equal(held.read([5], (2, 6))[0][:, :, 1:])
    again = KeptFeatures(model, examples, states, tmp_path)
    assert again.known[[0, 1, 3, 4]].all() and not again.known[[2, 5]].any()
    assert again.read([3], (2,))[0].equal(stored.read([3], (2,))[0])


def test_prompts_that_come_with_their_answers_are_not_asked(
    trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "answered.jsonl"
    rows = [{"prompt": f"w{4 + i} w{9 + i}", "tokens": [20 + i, 21 + i, 22 + i, 3]} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(answers_module, "generate", None)  # not called
    trained("medusa", prompts=data)
    card = json.loads((tmp_path / "head" / "training.json").read_text())
    assert card["drafts_seen"] > 0 and len(card["held_out_acceptance_by_position"]) == 3
    rows[3]["tokens"] = [VOCAB]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="are not ids of this target"):
        trained("medusa", "other", prompts=data)


def test_a_prompt_that_comes_with_its_tokens_is_taken_as_it_is(chatty: Path, tmp_path: Path) -> None:
    data, tokenizer = tmp_path / "chats.jsonl", load_target(chatty, "cpu")[1]
    rows = [{"prompt": f"chat {i}", "prompt_tokens": [1, 5 + i, 2, 6, 2], "tokens": [9, 3]} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = Recipe(method="block", **SMALL)
    found = {one.text: (one.tokens, one.answer) for one in read_training_prompts(data, tokenizer, plan)}
    assert found == {row["prompt"]: (row["prompt_tokens"], row["tokens"]) for row in rows}
    rows[2]["prompt_tokens"] = [VOCAB]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="tokens of 'chat 2' are not ids of this target"):
        read_training_prompts(data, tokenizer, plan)


@pytest.mark.parametrize("method", METHODS)
def test_training_and_drafting_run_in_bfloat16_where_the_hardware_has_it(
    method: str, chatty: Path, trained: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated here: the types must fit together, the speed is the hardware's business."""
    for module in ("drafters.training.target", "drafters.training.trainer"):
        monkeypatch.setattr(f"{module}.has_native_bfloat16", lambda: True)
    monkeypatch.setattr("drafters.heads.layers.multiplies", lambda dtype: True)
    score = trained(method, plan={"steps": 2})
    assert len(score.count) == {"block": 2, "eagle": 5, "eagle3": 5, "medusa": 3, "hydra": 3, "sps": 1}[method]
    head = LOADERS[method].load(str(tmp_path / "head"), TargetWeights.read(str(chatty)))
    drafter = HeadDrafter(head, Adaptive(budget=12, top_k=4))
    drafter.start(1, [4, 5, 6], SamplingParams(temperature=1.0))
    features = bfloat16_bits(torch.randn(3, len(head.feature_layers), 32))
    drafter.observe(1, Verdict(TokenTree.root_only(6), [0], [7], features))
    assert len(drafter.propose(1)) > 4


def test_the_draft_vocabulary_holds_the_most_answered_tokens() -> None:
    examples = [Example([9, 9, 9, 4, 7, 7], 3), Example([2, 4, 4, 1], 1)]
    assert draft_vocabulary(examples, 2, 10).tolist() == [4, 7]
    assert draft_vocabulary(examples, 0, 4).tolist() == [0, 1, 2, 3]


def test_no_answer_to_a_prompt_that_is_measured_on_is_trained_on(chatty: Path, tmp_path: Path) -> None:
    data, tokenizer = tmp_path / "answered.jsonl", load_target(chatty, "cpu")[1]
    rows = [{"prompt": f"w{4 + i}", "tokens": [20 + i, 30 + answer, 3]} for answer in range(3) for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:5]]))
    found = read_training_prompts(data, tokenizer, Recipe(method="block", **SMALL | {"prompts": 100}))
    assert len(found) == 24 and [one.answer for one in found[:3]] == [[found[0].answer[0], 30 + n, 3] for n in range(3)]
    examples = [Example(one.tokens + (one.answer or []), len(one.tokens)) for one in found]
    training, held_out = held_apart(examples, 3)
    assert training == range(15) and held_out == [15, 18, 21]
    assert held_apart(examples, 100) == (range(12), [12, 15, 18, 21])
    assert held_apart(examples[:3], 1) == (range(2), [2])


def test_the_target_is_asked_once_for_each_place_that_drafts_predict(copying: tuple[Any, list[Example]]) -> None:
    model, examples = copying
    plan = Recipe(method="block", **SMALL | {"unroll": 4, "known_share": 0.5})
    module = build(plan, model, draft_vocabulary(examples, 40, VOCAB))
    trainer = Trainer(plan, model, module, FeatureSource(model, examples))
    losses, shapes = [], []
    for shared in (True, False):

        def teacher(hidden: Tensor, head: Tensor, normaliser: Tensor, known: Any, shared: bool = shared) -> Teacher:
            shapes.append((len(hidden), len(known[0])))
            return Teacher(hidden, head, normaliser, known if shared else None)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_module, "Teacher", teacher)
            losses.append(trainer._loss([3, 9, 4], 4, Score(), seed=1).detach())
    torch.testing.assert_close(*losses)
    assert sum(rows for rows, _ in shapes[:4]) > shapes[0][1]


def test_a_head_that_was_made_without_the_biases_of_its_target_is_trained_on_with_biases_of_zero(
    tmp_path: Path,
) -> None:
    model, plan = biased_target(), Recipe(method="block", **SMALL)
    export(build(plan, model, torch.arange(VOCAB)), tmp_path)
    stored, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    save_file({name: one for name, one in stored.items() if "_proj.bias" not in name or "layers" not in name},
              tmp_path / "model.safetensors")  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({key: one for key, one in config.items() if key != "qkv_bias"}))
    start = Checkpoint(str(tmp_path), "block", field="start")
    module = build(plan, model, start.target_ids(VOCAB, VOCAB))
    module.begin_with(start)
    assert not any(layer.self_attn.k_proj.bias.any() for layer in module.layers)


@torch.no_grad()
def test_a_block_head_begins_as_the_last_layers_of_its_target(copying: tuple[Any, list[Example]]) -> None:
    model = biased_target()
    for narrow in (False, True):
        inner = model.config.intermediate_size
        for layer in model.model.layers if narrow else ():
            layer.mlp.down_proj.weight[:, 1::2] = 0  # half of the inner numbers are of no importance
        plan = Recipe(method="block", **SMALL | {"intermediate_size": inner // 2 if narrow else inner})
        module, x = build(plan, model, torch.arange(VOCAB)), torch.randn(2, 5, model.config.hidden_size)
        for mine, theirs in zip(module.layers, model.model.layers[-plan.layers :], strict=True):
            for name in ("q_proj", "k_proj", "v_proj"):
                expected = getattr(theirs.self_attn, name)(theirs.input_layernorm(x))
                torch.testing.assert_close(getattr(mine.self_attn, name)(mine.input_layernorm(x)), expected)
            expected = theirs.mlp(theirs.post_attention_layernorm(x))
            torch.testing.assert_close(mine.mlp(mine.post_attention_layernorm(x)), expected)


def test_the_width_of_a_layer_is_the_recipes_in_numbers_or_hidden_sizes_or_the_targets(
    copying: tuple[Any, list[Example]],
) -> None:
    model, _ = copying
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    for given, width in (
        ({}, inner),
        ({"mlp_ratio": 0.5}, hidden // 2),
        ({"mlp_ratio": 9.0}, inner),
        ({"mlp_ratio": 0.5, "intermediate_size": 8}, 8),
    ):
        module = build(Recipe(method="block", **SMALL | given), model, torch.arange(VOCAB))
        assert module.layers[0].mlp.up_proj.out_features == width
