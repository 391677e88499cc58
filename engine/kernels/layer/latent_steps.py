"""The steps of multi-head latent attention around attention itself, added to a program."""

from __future__ import annotations

from engine.kernels.attention.attention import LayerKeys
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.weights import AttentionWeights, LatentWeights


def latent_rows(program: LayerProgram, weights: AttentionWeights, of: LayerKeys) -> str:
    """Make the queries and the key of latent attention of x, for `enter`. Returns the name of the buffer."""
    assert weights.latent is not None
    latent, heads, dims = weights.latent, of.attention.q_per_kv, of.attention.pool.shape.head_dim
    plain, rotated, source = latent.to_latent[0].inputs, dims - latent.to_latent[0].outputs, "x"
    if latent.query_inputs is not None and latent.query_norm is not None:
        columns = len(latent.query_norm.weight)
        program.product(latent.query_inputs, "x", source := f"query inputs {columns}", columns)
        program.row_norm(latent.query_norm, program.buffers[source], 0)
    program.product(weights.qkv, source, "latent queries", heads * (plain + rotated))
    program.product(latent.keys, "x", "latent", dims)
    program.row_norm(latent.key_norm, program.buffers["latent"], rotated)
    made = program.buffer(name := f"qkv {(heads + 1) * dims}", (heads + 1) * dims).unflatten(1, (-1, dims))
    queries = program.buffers["latent queries"].unflatten(1, (heads, -1))
    program.copy(queries[..., plain:], made[:, :heads, :rotated])
    program.copy(program.buffers["latent"][:, None], made[:, heads:])
    program.by_heads(latent.to_latent, queries[..., :plain], made[:, :heads, rotated:])
    return name


def latent_values(program: LayerProgram, latent: LatentWeights, attended: str) -> str:
    """Make each head's value of the latent vector that attention gives it. Returns the name of the buffer."""
    heads = len(latent.to_values)
    made = program.buffer(name := "latent values", heads * latent.to_values[0].outputs)
    given = program.buffers[attended].unflatten(1, (heads, -1))[..., -latent.to_values[0].inputs :]
    program.by_heads(latent.to_values, given, made.unflatten(1, (heads, -1)))
    return name
