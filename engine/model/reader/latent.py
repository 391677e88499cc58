"""Reads multi-head latent attention: its keys and values are made of one vector for each token."""

from __future__ import annotations

from typing import Any

from engine.kernels.quant.layouts import STEP
from engine.kernels.simd import LANES
from engine.model.reader.mixers import held_as, interleaved
from engine.model.reader.parts import linear_structure, only, rms_structure
from engine.model.structure import AttentionStructure, LatentStructure, OtherStructure, Picked
from engine.weights.stored_weights import OWN, StoredWeights

LATENT = "kv_a_proj_with_mqa"
"""What makes the vector, and the part of keys that is rotated."""
_INPUTS, _WHOLE, _OF_INPUTS = "q_a_proj", "q_proj", "q_b_proj"  # of queries
_NORMS = "q_a_layernorm", "kv_a_layernorm"
_PARTS = {LATENT, _INPUTS, _WHOLE, _OF_INPUTS, *_NORMS, "kv_b_proj", "o_proj", "rotary_emb"}


def latent_attention_structure(
    attention: Any, prefix: str, config: Any, rotated: int, rotary_table: int, stored: StoredWeights | None
) -> AttentionStructure:
    """config: of the model. rotated, rotary_table: as in the structure. stored: the weights of a file, which may hold
    what makes keys and what makes values apart. Dimensions that are rotated come first here, the halves of each pair
    apart.
    """
    only(attention, _PARTS)
    heads, apart, latent = attention.num_heads, attention.qk_rope_head_dim, attention.kv_lora_rank
    key_dim, value_dim = attention.qk_nope_head_dim, attention.v_head_dim
    named = getattr(attention, _INPUTS, None) is not None
    inputs = attention.q_a_proj.out_features if named else 0
    wrong = key_dim % STEP or latent % STEP or apart % LANES or value_dim % LANES or inputs % LANES
    if wrong or rotated not in (0, apart):
        raise OtherStructure(
            f"latent attention with heads of {key_dim} and {apart}, values of {value_dim}, vectors of {latent} and of "
            f"{inputs} for queries: kernels run multiples of {STEP}"
        )
    pairs = rotated > 0 and _neighbours(attention, config)
    places = [*range(0, apart, 2), *range(1, apart, 2)] if pairs else [*range(apart)]
    queries = Picked(key_dim + apart, (*range(key_dim), *(key_dim + place for place in places)))
    keys = Picked(latent + apart, (*(latent + place for place in places), *range(latent)))
    own = tuple(held_as(prefix, stored, f"{name}.weight") for name in ("k_b_proj", "v_b_proj"))
    return AttentionStructure(
        qkv=linear_structure(attention, prefix, (_OF_INPUTS if named else _WHOLE,), "", (queries,)),
        out=linear_structure(attention, prefix, ("o_proj",)),
        heads=heads,
        kv_heads=1,
        head_dim=apart + latent,
        query_norm=None,
        key_norm=None,
        rotated=rotated,
        rotary_table=rotary_table,
        values_are_keys=True,
        latent=LatentStructure(
            query_inputs=linear_structure(attention, prefix, (_INPUTS,)) if named else None,
            query_norm=rms_structure(attention.q_a_layernorm, f"{prefix}{_NORMS[0]}.") if named else None,
            keys=linear_structure(attention, prefix, (LATENT,), "", (keys,)),
            key_norm=rms_structure(attention.kv_a_layernorm, f"{prefix}{_NORMS[1]}."),
            of_heads=own if own[0].startswith(OWN) else (f"{prefix}kv_b_proj.weight",),
            key_dim=key_dim,
            value_dim=value_dim,
        ),
    )


def _neighbours(attention: Any, config: Any) -> bool:
    """Return whether neighbouring dimensions are rotated, not halves: by an option, or as the family's code does it.
    One that multiplies complex numbers has no other way. All of it is proved.
    """
    option = getattr(config, "rope_interleave", None)
    return interleaved(attention) if option is None else bool(option)
