"""The script that an exchange folder carries, for its reader to look through and run; it is never run here."""

LOAD = '''\
"""Load the model of this folder into transformer-lens 2.x or 3.x (4.0 has no HookedTransformer any more).

Written by mechinterp, to be read before it is run. From Python, in this folder:

    from load import load_model, predict

    model = load_model()
    y_hat = predict(model, tokens)  # [batch, pos, d_model]: pairs (x, y), at last the query (x, 0)

Everything else goes by start_at_layer=0, too: model.run_with_cache(tokens.clone(), start_at_layer=0).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformer_lens import HookedTransformer, HookedTransformerConfig

FOLDER = Path(__file__).parent


def strict_causal(scores, hook):
    """A token attends to those before it and not to itself; the first one attends to nothing."""
    queries, keys = scores.shape[-2:]
    blocked = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries)
    return scores.masked_fill(blocked, -torch.inf)


def load_model():
    """The model; reset_hooks() leaves the strict mask on, including_permanent=True takes it off."""
    said = json.loads((FOLDER / "transformer_lens.json").read_text())
    weights = load_file(FOLDER / "model.safetensors")
    cfg = HookedTransformerConfig(
        **{name: said[name] for name in ("n_layers", "n_heads", "d_model", "d_head", "n_ctx")},
        attn_scale=said["attn_scale"],
        d_vocab=said["d_vocab"],
        d_vocab_out=said["d_vocab"],
        attn_only=True,
        normalization_type=None,
        default_prepend_bos=False,
        dtype=weights["blocks.0.attn.W_Q"].dtype,
        device="cpu",
    )
    model = HookedTransformer(cfg)
    # Not load_and_process_state_dict: centring would make a read-out of one column zero.
    model.load_state_dict({**model.state_dict(), **weights}, strict=True)
    # Up to 3.4 the mask is stored with the model; later it is not. The hook serves all versions.
    if "blocks.0.attn.mask" in model.state_dict() and model.blocks[0].attn.mask.numel():
        model.blocks[0].attn.mask = model.blocks[0].attn.mask.tril(-1)
    model.add_perma_hook("blocks.0.attn.hook_attn_scores", strict_causal)
    return model


def predict(model, tokens):
    """Prediction of y_query, [batch, d_y]. Hooks may write in place: into a copy, not into tokens."""
    return model(tokens.clone(), start_at_layer=0)[:, -1]
'''
