"""A loaded Hugging Face causal language model that verifies token trees, of many requests in one forward.

How it is run is found by trial (`engine.model.trial.forward_choice`), unless an earlier start has found it
(`engine.model.trial.proof`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import AUTO, Activations, ActivationsOption, Config, KVType
from engine.core.batch import BLOCK_SIZE
from engine.core.errors import ConfigError, ModelError, first_line
from engine.core.methods import METHODS, Method
from engine.kernels.gemm.product import PackedLinear, multiplies
from engine.model.decoder import LeanDecoder
from engine.model.decoder_layer import state_shape
from engine.model.forward import Captures
from engine.model.loading import (
    Facts,
    copy_mapped,
    facts_of,
    find_device,
    find_dtype,
    load_config,
    load_model,
    name_of,
    open_stored,
    reopened,
    skeleton,
    weights_of,
)
from engine.model.memory import check_memory, free_memory, kept_as, kv_room, pool_of
from engine.model.reader.parts import text_part
from engine.model.runner import Chosen, Runner
from engine.model.structure import OtherStructure
from engine.model.trial.activations import activations_of
from engine.model.trial.proof import Proof, ProvedModel
from engine.weights.gguf.file import GgufFile
from engine.weights.quantised_weights import QuantisedCheckpoint
from engine.weights.stored_weights import Unreadable


class Target(Runner):
    """A model, and the facts about it that decoding needs.

    full_context, own_context, eos_tokens: see `Facts`. exact: whether a token's logits have the same bits whatever
    other rows are in the forward; inexact_reason: why not, "" if it is exact. stock_reason: why a CPU runs the stock
    forward, which takes longer, and not the lean decoder; "" if it does not. weights: the type that most matrices are
    held in. model: the stock model; None if the target is known from an earlier start.
    """

    def __init__(self, name: str, facts: Facts, chosen: Chosen, device: torch.device, weights: str, model: Any = None):
        runner = chosen.runner
        super().__init__(runner.forward, runner.pool, runner.vocab_size, runner.dtype)
        self.name, self.facts, self.device, self.weights, self.model = name, facts, device, weights, model
        self.full_context, self.own_context = facts.full_context, facts.own_context
        self.layers, self.eos_tokens = facts.layers, facts.eos_tokens
        self.inexact_reason, self.stock_reason = chosen.inexact_reason, chosen.stock_reason

    @classmethod
    def of_model(
        cls, model: Any, name: str, kv_memory: int | None = None, kv_type: KVType = "auto", draft: bool = False
    ) -> Target:
        """Return the target of a stock model in memory. kv_memory, kv_type, draft: see `load`."""
        from engine.model.trial.forward_choice import ForwardChoice

        facts = _facts_of(model, name)
        choice = ForwardChoice(model.eval(), name, facts.own_context, kv_memory, model.device, kv_type, draft)
        return cls(name, facts, choice.of_model(), model.device, name_of(model.dtype), model)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: str = "auto",
        device: str = "auto",
        kv_memory: int | None = None,
        activations: ActivationsOption = "bfloat16",
        kv_type: KVType = "auto",
        draft: bool = False,
    ) -> Target:
        """Load a checkpoint directory or hub id. kv_memory: bytes for keys and values, None: a share of free memory.
        activations: int8 for matrices in blocks, where there are any and the lean decoder runs them, or auto: see
        `Config`.
        kv_type: q8_0 for keys and values in 8 bits, where the lean decoder runs the model: see `kv_type`.
        draft: whether it is a draft model, which need not be exact.
        """
        target = cls._load_stored(path, dtype, find_device(device), kv_memory, activations, kv_type)
        if isinstance(target, str):
            model = load_model(path, dtype, find_device(device), not_lean=target)
            target = cls.of_model(model, path, kv_memory, kv_type, draft)
        if target.model is None:
            return target
        if isinstance(target.forward, LeanDecoder):  # which has copies in its own layout
            text_part(target.model)[0].layers, target.model.lm_head = torch.nn.ModuleList(), torch.nn.Identity()
        elif target.device.type == "cpu":
            copy_mapped(parameter for parameter in target.model.parameters() if parameter.dim() > 1)
        return target

    @classmethod
    def of_config(cls, config: Config) -> Target:
        """Return the target that a configuration names. Raises ConfigError if it cannot have those weights or
        activations, or keys and values of that type.
        """
        memory, kv_type = config.verifier.kv_memory, config.verifier.kv_type
        target = cls.load(config.model, config.dtype, config.device, memory, config.activations, kv_type)
        if config.weights not in (AUTO, target.weights):
            raise ConfigError(
                f"weights={config.weights}: quantised weights are multiplied by CPUs in bfloat16, and this is "
                f"{target.weights} on {target.device.type}; set dtype=auto and device=cpu, or leave weights out"
            )
        if config.activations not in (AUTO, target.activations):
            raise ConfigError(
                f"activations={config.activations}: this model has no matrices in blocks that this processor "
                f"multiplies so; take a GGUF file of a common structure, weights=q8_0, or "
                f"activations={target.activations}"
            )
        if kv_type not in ("auto", target.kv_type):
            raise ConfigError(
                f"verifier.kv_type={kv_type}: only the lean decoder keeps keys and values so, on a CPU with AVX2, and "
                "this model does not run on it here; take verifier.kv_type=auto"
            )
        if drafting_model(config).reads_keys and not target.key_pieces:
            raise ConfigError(
                f"method={config.method}: an assistant reads the target's keys and values, which only the lean decoder "
                f"gives, and this target does not run on it ({target.stock_reason or target.device.type}); take "
                "method=suffix"
            )
        return target

    @classmethod
    def _load_stored(
        cls,
        path: str,
        dtype: str,
        device: torch.device,
        kv_memory: int | None,
        activations: ActivationsOption,
        kv_type: KVType,
    ) -> Target | str:
        """Return the target of a directory whose weights lie in blocks or are quantised, with nothing in memory but the
        decoder's own layout. If a whole model has to be loaded for it, return why the lean decoder does not run the
        file; "" if there is no file, or it is asked for in another type.
        """
        if device.type != "cpu" or (stored := open_stored(Path(path))) is None:
            return ""
        taken = activations_of(Path(path), stored) if activations == "auto" else activations
        proof = Proof(Path(path), dtype, taken, kv_type)
        proved = proof.read()
        if proved is not None:
            check_memory(stored, f"model={path}", free_memory())
            with torch.inference_mode():
                return cls._of_proved(path, proved, stored, kv_memory, taken, kv_type)
        config = load_config(path)
        if find_dtype(dtype, config, device) != torch.bfloat16 or not multiplies(torch.bfloat16):
            return ""
        check_memory(stored, f"model={path}", free_memory())
        from engine.model.trial.forward_choice import ForwardChoice

        model = skeleton(path, config)
        facts = _facts_of(model, path)
        choice = ForwardChoice(model, path, facts.own_context, kv_memory, device, kv_type)
        try:
            weights = weights_of(stored, model)
            return cls(path, facts, choice.of_file(weights, taken, facts, proof), device, weights.kind, model)
        except (Unreadable, OtherStructure, AttributeError) as error:  # a part of the structure is missing
            if isinstance(stored, GgufFile) or stored.packed:
                return first_line(error)
            raise ModelError(
                f"weights={stored.kind.lower()}: this model cannot be run with quantised weights "
                f"({first_line(error)}); leave weights out"
            ) from error

    @classmethod
    def _of_proved(
        cls,
        path: str,
        proved: ProvedModel,
        stored: GgufFile | QuantisedCheckpoint,
        kv_memory: int | None,
        activations: Activations,
        kv_type: KVType,
    ) -> Target:
        """Return the target that an earlier start has tried, without transformers."""
        weights = reopened(stored, proved.places, proved.vectors)
        structure, device = proved.structure, torch.device("cpu")
        room, states = kv_room(kv_memory, device, weights.size), state_shape(structure, torch.bfloat16)
        pool = pool_of(structure.key_sizes, torch.bfloat16, kept_as(kv_type, device), room, device, states)
        lean = LeanDecoder(structure, pool, proved.rules, weights, activations)
        chosen = Chosen(Runner(lean, pool, proved.facts.vocab_size, torch.bfloat16), "")
        return cls(path, proved.facts, chosen, device, weights.kind)

    @property
    def context(self) -> int:
        """The maximum positions of a request: the model's, as far as the pool has room for them."""
        return self.own_context if self.pool is None else min(self.own_context, self.pool.blocks * BLOCK_SIZE)

    @property
    def exact(self) -> bool:
        return not self.inexact_reason

    @property
    def key_pieces(self) -> int:
        """The number of states that its keys and values take for a head that reads them; 0 if it gives none."""
        return self.forward.structure.key_pieces if isinstance(self.forward, LeanDecoder) else 0

    @property
    def forward_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a forward computes. Fewer are padded to the next of these, more run in slices of the
        last.
        """
        return self.forward.sizes

    @torch.inference_mode()
    def capture(self, feature_layers: Sequence[int]) -> None:
        """Capture the CUDA graphs that most requests need, before these come. Does nothing without such graphs."""
        if isinstance(self.forward, Captures):
            self.forward.capture(feature_layers, self.context)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as they are laid out."""
        if isinstance(self.forward, LeanDecoder):
            return self.forward.weight_bytes
        packed = (module.product.bytes for module in self.model.modules() if isinstance(module, PackedLinear))
        others: int = sum(weight.nbytes for weight in self.model.parameters())
        return others + sum(packed)

    @property
    def matrix_bytes(self) -> int | None:
        """Bytes of the weights that a forward reads; None if their layout is not ours."""
        return self.forward.matrix_bytes if isinstance(self.forward, LeanDecoder) else None


def drafting_model(config: Config) -> Method:
    """Return the method of the model that drafts, or the configuration's own if none does."""
    named = config.drafter.head if METHODS[config.method].merges else config.method
    return METHODS.get(named, METHODS[config.method])


def _facts_of(model: Any, name: str) -> Facts:
    """Return the facts of a stock model. Raises ModelError if its texts have no limit that Talon knows."""
    if not hasattr(model.config.get_text_config(), "num_attention_heads"):
        raise ModelError(
            f"model={name}: no layer of the {model.config.model_type} family attends, and its configuration names no "
            "max_position_embeddings; use a hybrid of layers with a state and attention"
        )
    if (facts := facts_of(model)) is None:
        raise ModelError(
            f"model={name}: the {model.config.model_type} family names no max_position_embeddings, and has no "
            "positions that a tree could be given; use another target"
        )
    return facts
