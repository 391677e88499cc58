"""The steps of a decoder layer, added to a program: what comes after its mixer's inputs, its MLP and its experts."""

from __future__ import annotations

from engine.kernels.attention.attention import LayerKeys
from engine.kernels.layer.experts import ExpertRecords
from engine.kernels.layer.latent_steps import latent_values
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.weights import AttentionWeights, ExpertMlp, GatedMlp, LayerInput, LayerWeights
from engine.kernels.state.walk import LayerPlace


def attention_and_mlp(
    program: LayerProgram, weights: LayerWeights, of: LayerKeys, source: str, place: LayerPlace | None = None
) -> None:
    """Add all of a layer that comes after its queries, keys and values were made of its input, in `source`. place: of
    what is beside attention, if anything.
    """
    assert isinstance(weights.mixer, AttentionWeights)
    if weights.mixer.clip:
        program.clip(program.buffers[source], weights.mixer.clip)
    program.enter(of, source, weights.mixer)
    attended = program.attend(of)
    if weights.mixer.latent is not None:
        attended = latent_values(program, weights.mixer.latent, attended)
    if weights.mixer.gated:
        program.gate_rows(attended, source)
    if weights.mixer.sub_norm is not None:
        program.row_norm(weights.mixer.sub_norm, program.buffers[attended], 0)
    _after_mixer(program, weights, attended, place)


def state_and_mlp(program: LayerProgram, weights: LayerWeights, place: LayerPlace) -> None:
    """Add all of a layer with a state that comes after the norm of its input."""
    assert weights.mixer is not None and not isinstance(weights.mixer, AttentionWeights)
    _after_mixer(program, weights, weights.mixer.build(program, place))


def mlp_alone(program: LayerProgram, weights: LayerWeights) -> None:
    """Add all of a layer without a mixer that comes after the norm of its input."""
    assert weights.mlp is not None
    _mlp_of(program, weights, weights.mlp)


def _after_mixer(program: LayerProgram, weights: LayerWeights, made: str, place: LayerPlace | None = None) -> None:
    """Add the mixer's last product, of the buffer `made`, and what comes after it. place: of what is beside it, if
    anything.
    """
    of_mixer, of_beside, _ = weights.scales
    assert weights.mixer is not None
    program.product(weights.mixer.out, made, "delta", program.residual.shape[1])
    if weights.beside is not None:
        assert place is not None
        program.delta(weights.out_norm, of_mixer)
        program.norm(None, "sum")
        made = weights.beside.build(program, place)
        program.product(weights.beside.out, made, "delta", program.residual.shape[1])
        of_mixer = of_beside
    if weights.mlp is None:
        program.delta(weights.out_norm, of_mixer)
        return
    if weights.parallel:
        if weights.inner_norm is not None:
            program.norm(weights.inner_norm)
        program.delta(weights.out_norm, of_mixer)
        program.norm(None, "sum")
    else:
        program.delta(weights.out_norm, of_mixer)
        program.norm(weights.inner_norm)
    _mlp_of(program, weights, weights.mlp)


def _mlp_of(program: LayerProgram, weights: LayerWeights, mlp: GatedMlp | ExpertMlp) -> None:
    """Add the layer's MLP or experts, of x, and what comes after them."""
    if isinstance(mlp, GatedMlp):
        gated_mlp(program, mlp, f"inner {mlp.inner}", "delta")
    else:
        expert_mlp(program, mlp)
    added = weights.layer_input
    program.delta(weights.down_norm, weights.scales[2], 1.0 if added is not None else weights.scale)
    if added is not None:
        _layer_input(program, added, program.layers - 1)
        program.delta(added.norm, whole_scale=weights.scale)


def _layer_input(program: LayerProgram, added: LayerInput, layer: int) -> None:
    """Add delta = out(act(gate(residual)) * the layer's part of what `layer_inputs` made)."""
    program.norm(None)
    inputs, width = program.buffers["layer_inputs"], added.width
    program.product(added.gate, "x", "layer_gate", width)
    up = inputs.data_ptr() + layer * width * inputs.itemsize
    program.act("layer_gate", up, inputs.stride(0) * inputs.itemsize, "layer_gated", width, added.activation)
    program.product(added.out, "layer_gated", "delta", program.residual.shape[1])


def gated_mlp(program: LayerProgram, mlp: GatedMlp, inner: str, goal: str) -> None:
    """Add goal = down(act(gate) * up) of x. inner: the name of the buffer between the products."""
    if mlp.gated:
        program.product(mlp.gate_up, "x", inner, mlp.inner)
    else:
        both = f"{inner} gate_up"
        program.product(mlp.gate_up, "x", both, (1 if mlp.plain else 2) * mlp.inner)
        rows = program.buffers[both]
        up = 0 if mlp.plain else rows.data_ptr() + mlp.inner * rows.itemsize
        stride = rows.stride(0) * rows.itemsize
        kind = mlp.activation, mlp.gate_scale, mlp.amounts
        program.act(both, up, stride, inner, mlp.inner, *kind)
    if mlp.sub_norm is not None:
        program.row_norm(mlp.sub_norm, program.buffers[inner], 0)
    program.product(mlp.down, inner, goal, program.residual.shape[1])


def expert_mlp(program: LayerProgram, mlp: ExpertMlp) -> None:
    """Add delta = what the experts of each row make of x, and the shared one, each with norms of its own if there are
    any.
    """
    gates, norms, hidden = mlp.shared is not None and mlp.shared_gate, mlp.norms, program.residual.shape[1]
    if mlp.shared is not None:
        gated_mlp(program, mlp.shared, "shared_inner", "shared")
    if norms is not None:
        program.norm(norms.router, "router_x")
        program.norm(norms.inputs)
    program.product(mlp.router, "x" if norms is None else "router_x", "router", len(mlp.gate_up) + gates)
    ends = program.buffers["x"], program.buffers["router"], program.buffer("delta", hidden)
    packed, inner = program.buffer("packed", hidden, mlp.top_k), program.buffer("packed_inner", mlp.inner, mlp.top_k)
    both = inner.shape[1] * (1 if mlp.plain else 2)
    made = inner if mlp.gated else program.buffer("packed_gate_up", both, mlp.top_k)
    shared = program.buffers["shared"] if mlp.shared is not None and norms is None else None
    program.experts(mlp, ExpertRecords(mlp, *ends, packed, made, inner, shared), made, inner)
    if norms is not None:
        program.row_norm(norms.shared, program.buffers["shared"], 0)
        program.row_norm(norms.outputs, program.buffers["delta"], 0, program.buffers["shared"])
