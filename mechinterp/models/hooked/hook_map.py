"""Table of a hooked model's hook points, their shapes, and the switches that turn them on."""

import copy
from dataclasses import replace

import pandas as pd
import torch

from mechinterp.models.hooked.config import SWITCHES
from mechinterp.models.hooked.transformer import ICLTransformer


def hook_map(model: ICLTransformer) -> pd.DataFrame:
    """One row per hook point: its name, its shape, and the setter that turns it on ("" if it always fires).

    Example:
        >>> from mechinterp.config import ModelConfig
        >>> frame = hook_map(ICLTransformer(ModelConfig(n_heads=2), d_x=5, d_y=1))
        >>> frame.loc[frame["name"] == "blocks.0.attn.hook_pattern", "shape"].item()
        ['batch', 2, 'pos', 'pos']
    """
    # Two sizes that no model has mark the batch and pos axes; the meta device needs no memory.
    names = {10_007: "batch", 10_009: "pos"}
    twin = copy.deepcopy(model).to("meta")
    twin.reset_hooks(including_permanent=True)
    if twin.cfg.model.n_positions is not None:
        twin.cfg.model = replace(twin.cfg.model, n_positions=max(names))
        W_pos = torch.empty(max(names), twin.cfg.d_model, dtype=twin.cfg.dtype, device="meta")
        twin.pos_embed["W_pos"] = torch.nn.Parameter(W_pos)
    inputs = torch.empty(*names, twin.cfg.d_token, dtype=twin.cfg.dtype, device="meta")
    for switch in SWITCHES:
        getattr(twin, f"set_{switch}")(False)
    rows: dict[str, dict[str, object]] = {}
    for switch in ("", *SWITCHES):
        setter = switch and f"set_{switch}"
        if setter:
            # hook_mlp_in may need the zero MLP; hook_attn_in and the split inputs exclude each other.
            twin.set_use_attn_in(False)
            getattr(twin, setter)(True)
        _, cache = twin.run_with_cache(inputs)
        for name in twin.hook_dict.keys() & cache.keys():
            values = cache[name]
            shape = [names.get(size, size) for size in values.shape]
            rows.setdefault(name, {"name": name, "shape": shape, "switch": setter})
    return pd.DataFrame([rows[name] for name in twin.hook_dict])
