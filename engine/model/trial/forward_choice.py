"""Which forward a model gets: the first of `engine.model.forward` whose logits are those of the stock forward.

Each is tried at load (`engine.model.trial.probe`). A model in memory is run by the stock forward with exact attention,
then by the lean decoder, which has to agree with it too; if exact attention does not work, with masks. One whose
matrices stay in a file's blocks can only be run by the lean decoder, and is compared layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch

from engine.config import Activations, KVType
from engine.core.errors import ConfigError, ModelError, first_line
from engine.kernels.attention.attention import Rule
from engine.kernels.gemm.product import pack_linears
from engine.kernels.pointwise import PointwiseOperations
from engine.model.cuda_products import allow_split_sums, exact_sizes, forbid_split_sums, hold_split_sums
from engine.model.decoder import LeanDecoder
from engine.model.decoder_layer import InMemory, state_shape
from engine.model.forward import Forward
from engine.model.kv_pool import KVPool
from engine.model.loading import Facts, has_states, name_of
from engine.model.masked import MaskedForward, refusal
from engine.model.memory import kept_as, kv_room, pool_of
from engine.model.reader.decoder import describe
from engine.model.reader.mixers import head_sizes
from engine.model.rotary import hold_frequencies
from engine.model.runner import Chosen, Runner
from engine.model.stock import NAME, StockForward, Unsupported
from engine.model.structure import AttentionStructure, DecoderStructure, GatedDeltaStructure, OtherStructure
from engine.model.trial.probe import ModelProbe
from engine.model.trial.proof import Proof, ProvedModel
from engine.model.trial.stock_logits import LayeredStock, WholeStock, passed_rules
from engine.model.trial.windows import short_windows
from engine.weights.stored_weights import StoredWeights

_BESIDE = "a token's logits depend on the rows beside it"


class ForwardChoice:
    """context: the positions that will be served. kv_memory: bytes for keys and values, None: a share of what is free.
    device: where the forward runs. kv_type: what the lean decoder keeps keys and values as.
    draft: whether it is a draft model, which need not be exact and leaves the products of its process to the target.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        context: int,
        kv_memory: int | None,
        device: torch.device,
        kv_type: KVType = "auto",
        draft: bool = False,
    ):
        self.model, self.name, self.context, self.kv_memory, self.device = model, name, context, kv_memory, device
        self.draft = draft
        self.kv_type = kept_as(kv_type, device)
        self.structure: DecoderStructure | None = None  # as far as it is known

    @property
    def accelerated(self) -> bool:
        """Whether exact attention is that of `engine.model.cuda.cuda_forward`."""
        return bool(self.device.type == "cuda")

    @torch.inference_mode()
    def of_model(self) -> Chosen:
        """Choose for a model in memory. Raises ModelError if its attention can take neither our function nor a mask."""
        if self.accelerated:
            forbid_split_sums()
        self._check_parts()
        trial = ModelProbe(self.model, self.name, self.context, WholeStock(self.model, self.name))
        hold_frequencies(self.model)
        chosen = self._try_exact(trial)
        if not isinstance(chosen, str):
            return chosen
        if self._has_own_keys():
            raise ModelError(
                f"model={self.name}: {self.model.config.model_type} has layers with keys of several shapes, which the "
                f"lean decoder alone can hold, and it does not run here ({chosen}); use another target"
            )
        if has_states(self.model.config):
            raise ModelError(
                f"model={self.name}: {self.model.config.model_type} has layers with a state, which the lean decoder "
                f"alone can take back to before a draft, and it does not run here ({chosen}); use "
                + ("device=cpu" if self.accelerated else "a model whose layers all attend")
            )
        return Chosen(self._masked(trial), chosen, chosen if self.device.type == "cpu" else "")

    @torch.inference_mode()
    def of_file(self, weights: StoredWeights, activations: Activations, facts: Facts, proof: Proof) -> Chosen:
        """Choose for a model on the meta device, whose matrices stay in blocks; what is found out goes to `proof`.
        Raises OtherStructure if the lean decoder cannot run the model, or differs from the stock forward.
        """
        weights.fill_small(self.model)
        held = deepcopy(self.model)
        hold_frequencies(held)
        structure = self.structure = describe(held, weights)
        stock = LayeredStock(self.model, weights)
        trial = ModelProbe(self.model, self.name, self.context, stock)
        rules = stock.passed[0]
        pool = self._make_pool(weights=weights.size)
        lean = LeanDecoder(structure, pool, rules, weights, activations)
        runner = self._runner(lean, pool)
        if trial.beyond is not None:
            lean.take_rules(stock.passed[1])
            agrees = trial.agrees(runner, trial.beyond)
            lean.take_rules(rules)
        if (trial.beyond is not None and not agrees) or not trial.agrees_anywhere(runner):
            raise OtherStructure("its logits differ from those of the stock forward")
        lean.forget_far()
        served = self._served(lean, runner, trial)
        if not trial.equal_bits(served):
            return Chosen(served, _BESIDE)
        proof.write(ProvedModel(facts, structure, rules, weights.places, weights.own_vectors))
        return Chosen(served, "")

    def _check_parts(self) -> None:
        """Raise ModelError for a model whose structure is known, and whose parts do not go together."""
        with suppress(OtherStructure, AttributeError):
            describe(self.model)

    def _runner(self, forward: Forward | MaskedForward, pool: KVPool | None) -> Runner:
        return Runner(forward, pool, self.model.config.get_text_config().vocab_size, self.model.dtype)

    def _try_exact(self, trial: ModelProbe) -> Chosen | str:
        """Try the forwards with exact attention; return one, or why there is none."""
        if self.model.dtype not in (torch.float32, torch.bfloat16):
            return f"its type is {name_of(self.model.dtype)}"
        if self.accelerated:
            return self._try_cuda(trial)
        if self.device.type != "cpu":
            return f"exact attention is not there for {self.device.type} yet"
        if has_states(self.model.config) or self._has_own_keys() or self._is_latent():
            return self._try_lean_alone(trial)
        with PointwiseOperations() as pointwise:
            stock = self._try_attention(StockForward, trial)
        if isinstance(stock, str):
            pack_linears(self.model)
            return stock
        lean = self._try_lean(stock, trial)
        if isinstance(lean, str):
            return Chosen(stock, self._inexact_stock(stock, trial, pointwise), lean)
        return self._chosen_lean(lean, trial)

    def _chosen_lean(self, lean: Runner, trial: ModelProbe) -> Chosen:
        """Choose the lean decoder, which agreed with the stock forward."""
        assert isinstance(lean.forward, LeanDecoder)
        served = self._served(lean.forward, lean, trial)
        even = lean.forward.exact
        return Chosen(served, self._inexact(served, trial) if even else self._uneven("number of rows"))

    def _has_own_keys(self) -> bool:
        """Return whether layers have keys of several shapes or read other layers' keys, which only the lean decoder can
        do.
        """
        try:
            structure = describe(self.model)
        except (OtherStructure, AttributeError):
            return False
        return len(structure.key_sizes) > 1 or not all(place.own for place in structure.key_places)

    def _is_latent(self) -> bool:
        """Return whether a layer has latent attention, whose keys and values no stock forward of ours can hold."""
        try:
            return any(mixer.latent is not None for mixer in describe(self.model).attending.values())
        except (OtherStructure, AttributeError):
            return False

    def _try_lean_alone(self, trial: ModelProbe) -> Chosen | str:
        """Return the lean decoder for a model that no other forward of ours runs, or why it cannot run the model."""
        try:
            self.structure = describe(self.model)
            pool = self._make_pool()
            rules = passed_rules(self.model)
            lean = LeanDecoder(self.structure, pool, rules, InMemory(self.model))
        except (OtherStructure, AttributeError) as error:  # a part of the structure is missing
            return first_line(error)
        runner = self._runner(lean, pool)
        if trial.beyond is not None:
            with short_windows(trial.config):
                lean.take_rules(passed_rules(self.model))
            agrees = trial.agrees(runner, trial.beyond)
            lean.take_rules(rules)
        if (trial.beyond is not None and not agrees) or not trial.agrees_anywhere(runner):
            return "its logits differ from those of the lean decoder"
        lean.forget_far()
        return self._chosen_lean(runner, trial)

    def _served(self, lean: LeanDecoder, tried: Runner, trial: ModelProbe) -> Runner:
        """Return the lean decoder with keys and values of the type that is asked for, once it agreed with the stock
        forward in the model's own type (`tried`). Raises ConfigError if rounding keys and values takes its logits far
        from the stock forward's.
        """
        if self.kv_type == "auto":
            return tried
        self.structure = lean.structure
        pool = self._make_pool(kv_type=self.kv_type)
        lean.take_pool(pool)
        served = self._runner(lean, pool)
        if not trial.agrees_anywhere(served):
            raise ConfigError(
                f"verifier.kv_type={self.kv_type}: this model's logits change too much with keys and values of 8 bits; "
                "take verifier.kv_type=auto"
            )
        lean.forget_far()
        return served

    def _inexact_stock(self, stock: Runner, trial: ModelProbe, pointwise: PointwiseOperations) -> str:
        """Why the stock forward is not exact on a CPU, "" if it is. Its products become our own."""
        even = pack_linears(self.model)
        if (other := _other_matrix(self.model)) is not None:
            return f"{other} is multiplied in a way of its own"
        if (operation := pointwise.depending_on_place(torch.get_num_threads())) is not None:
            return f"on this machine {operation} depends on the rows before it"
        return self._inexact(stock, trial) if even else self._uneven("number of rows")

    @staticmethod
    def _inexact(runner: Runner, trial: ModelProbe) -> str:
        return "" if trial.equal_bits(runner) else _BESIDE

    def _uneven(self, what: str) -> str:
        return f"products in {name_of(self.model.dtype)} depend on the {what} on this machine"

    def _try_cuda(self, trial: ModelProbe) -> Chosen | str:
        """Try the CUDA forward; return it, or why it does not fit."""
        try:
            from engine.model.cuda.cuda_forward import CudaForward
        except ImportError:
            return "exact attention on CUDA needs Triton: pip install triton"
        if has_states(self.model.config):
            runner = self._try_states(CudaForward.lean_alone, trial)
        else:
            runner = self._try_attention(CudaForward.tried, trial)
        if isinstance(runner, str):
            return runner
        forward = runner.forward
        assert isinstance(forward, CudaForward)
        if forward.lean is None:
            if (other := _other_matrix(self.model)) is not None:
                return Chosen(runner, f"{other} is multiplied in a way of its own")
            if forward.take_lean(self.context) and not trial.agrees_anywhere(runner):
                forward.drop_lean()
        usual = forward.sizes
        found = exact_sizes(forward.linears, forward.possible)
        if len(found) > 1:
            found = forward.agreeing(found)
        if len(found) > 1:
            forward.sizes = found
        elif not self.draft and allow_split_sums():
            forward.recorded.clear()  # they were captured with the other products
            found = exact_sizes(forward.linears, usual)
        if not found:
            return Chosen(runner, self._uneven("row's place"))
        inexact = self._inexact(runner, trial)
        if not (inexact or self.draft):
            hold_split_sums(forward)
        return Chosen(runner, inexact)

    def _try_states(
        self, make: Callable[[Any, KVPool, int, dict[int, Rule], int], Forward], trial: ModelProbe
    ) -> Runner | str:
        """Return the forward that `make` makes on CUDA for a model with layers that have a state, or why there is
        none.
        """
        heads, kv_heads, _ = head_sizes(self.model.config.get_text_config())
        try:
            self.structure = describe(self.model)
            mixers = [mixer for layer in self.structure.layers for mixer in (layer.mixer, layer.beside)]
            if not all(isinstance(mixer, AttentionStructure | GatedDeltaStructure | None) for mixer in mixers):
                return "of such layers a GPU runs gated delta nets alone"
            if trial.beyond is not None:
                return "beside windows such layers run on a CPU"
            pool, rules = self._make_pool(), passed_rules(self.model)
            runner = self._runner(make(self.model, pool, heads // kv_heads, rules, self.context), pool)
        except torch.OutOfMemoryError as error:
            raise self._no_room(error) from error
        except (OtherStructure, Unsupported, AttributeError, RuntimeError) as error:  # or a part of it is missing
            return first_line(error)
        return runner if trial.agrees_anywhere(runner) else "its logits differ from those of the lean layers"

    def _no_room(self, error: Exception) -> ModelError:
        return ModelError(
            f"verifier.kv_memory: the GPU has no room for the pool beside the model ({first_line(error)}); lower it"
        )

    def _try_attention(self, make: Callable[[Any, KVPool, int], Forward], trial: ModelProbe) -> Runner | str:
        """Return the stock forward that `make` makes with our attention; or why it failed, with the model's own
        attention restored.
        """
        usual = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(NAME)
            heads, kv_heads, head_dim = head_sizes(self.model.config.get_text_config())
            pool, q_per_kv = self._make_pool([(trial.config.num_hidden_layers, kv_heads, head_dim)]), heads // kv_heads
            with short_windows(trial.config):  # a CUDA graph keeps the windows that it was captured with
                runner = self._runner(make(self.model, pool, q_per_kv), pool)
                agrees = trial.beyond is None or trial.agrees(runner, trial.beyond)
            runner = self._runner(make(self.model, pool, q_per_kv), pool)
            if trial.agrees_anywhere(runner) and agrees:
                return runner
            reason = "its logits differ with exact attention"
        except torch.OutOfMemoryError as error:
            raise self._no_room(error) from error
        except (Unsupported, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
            reason = f"its attention cannot be replaced ({first_line(error)})"
        self.model.set_attn_implementation(usual)
        return reason

    def _try_lean(self, stock: Runner, trial: ModelProbe) -> Runner | str:
        """Return the lean decoder over the stock forward's pool, or why it cannot run the model."""
        assert isinstance(stock.forward, StockForward) and stock.pool is not None
        try:
            lean = LeanDecoder(describe(self.model), stock.pool, stock.forward.rules, InMemory(self.model))
        except (OtherStructure, AttributeError) as error:  # a part of the structure is missing
            return first_line(error)
        runner = self._runner(lean, stock.pool)
        if not trial.agrees_anywhere(runner):
            return "its logits differ from those of the lean decoder"
        lean.forget_far()
        return runner

    def _masked(self, trial: ModelProbe) -> Runner:
        """Return the stock forward with its own attention and a mask."""
        try:
            with short_windows(trial.config):  # a forward looks up the windows when it is made
                runner = self._runner(MaskedForward(self.model, self.name, trial.heeds_windows), None)
                agrees = trial.beyond is None or trial.agrees(runner, trial.beyond)
            masked = MaskedForward(self.model, self.name, trial.heeds_windows)
            masked.check_recording()
            runner = self._runner(masked, None)
            agrees = agrees and trial.agrees_anywhere(runner)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refusal(self.model, self.name, first_line(error)) from error
        if not agrees:
            raise refusal(self.model, self.name, "its logits with one differ from those without")
        return runner

    def _make_pool(
        self, sizes: Sequence[tuple[int, int, int]] = (), kv_type: KVType = "auto", weights: int = 0
    ) -> KVPool:
        """sizes: see `pool_of`, where the structure is not known. weights: bytes that are still to be read into memory
        when the first pool is made, for which free memory is measured.
        """
        states = None
        if self.structure is not None:
            sizes, states = self.structure.key_sizes, state_shape(self.structure, self.model.dtype)
        self.kv_memory = kv_room(self.kv_memory, self.device, weights)
        return pool_of(sizes, self.model.dtype, kv_type, self.kv_memory, self.device, states)


def _other_matrix(model: Any) -> str | None:
    """Return the name of a matrix that is neither an embedding nor in a linear layer, such as experts of few rows; None
    if there is none.
    """
    known = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or type(module) is torch.nn.Linear
    }
    others = (name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in known)
    return next(others, None)
