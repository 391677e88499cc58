"""How GGUF files hold multi-head latent attention: what makes keys of the latent vector, and what makes values, apart.
The first has its inputs and outputs exchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.layer_reader import LayerReader
from engine.weights.stored_weights import OWN, Place

_KEYS = "attn_k_b.weight"


class LatentReader(LayerReader):
    """What llama.cpp's converter makes two of. Older files, and MiniCPM3's, have transformers' one matrix."""

    def __init__(self, file: GgufFile, attention: Any, prefix: str, block: str):
        """attention: the stock model's, on the meta device."""
        super().__init__(file, prefix, block)
        if file.tensor(f"{block}{_KEYS}") is None:
            return
        heads, key, value = attention.num_heads, attention.qk_nope_head_dim, attention.v_head_dim
        latent = attention.kv_lora_rank
        keys = self.found(_KEYS, (key, latent, heads))
        values = self.found("attn_v_b.weight", (latent, value, heads))
        self.places = {
            f"{OWN}{prefix}k_b_proj.weight": Place((keys,), (heads, latent, key)),
            f"{OWN}{prefix}v_b_proj.weight": Place((values,), (heads, value, latent)),
            f"{prefix}kv_b_proj.weight": Place((keys, values), (heads * (key + value), latent), heads=heads),
        }


class ChannelDeltaReader(LayerReader):
    """Kimi Linear's layers with a state: a convolution of q, k and v each, and minus the exponential of transformers'
    number.
    """

    def __init__(self, file: GgufFile, net: Any, prefix: str, block: str):
        """net: the stock model's, on the meta device."""
        super().__init__(file, prefix, block)
        channels, gate = net.num_heads * net.head_dim, f"{prefix}forget_gate."
        taps = [self.numbers(f"ssm_conv1d_{name}.weight", channels) for name in "qkv"]
        decay = self.decay(net.num_heads)
        self.vectors[f"{prefix}conv1d.weight"] = torch.cat([of.reshape(channels, 1, -1) for of in taps])
        self.vectors |= {f"{OWN}{gate}A_log": decay, f"{gate}A_log": (-decay).log()[None, None, :, None]}
        self.vectors[f"{gate}dt_bias"] = self.numbers("ssm_dt.bias", channels)
