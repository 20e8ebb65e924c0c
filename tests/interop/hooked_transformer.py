"""Runs beside another version of transformer-lens, in an environment that does not have this package.

Usage: python hooked_transformer.py FOLDER OUT

FOLDER is what `mechinterp convert --to transformer-lens` wrote; OUT holds prompts.safetensors (tokens)
and gets y_hat.safetensors and, from a model with other weights, state.pt and its predictions.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file


def recipe(folder: Path) -> ModuleType:
    """The folder's load.py, imported as its reader would."""
    spec = importlib.util.spec_from_file_location("load", folder / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def give_other_weights(model) -> None:
    """Normal weights; W_O writes only what is read out."""
    generator = torch.Generator().manual_seed(7)
    attn = model.blocks[0].attn
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        getattr(attn, name).normal_(std=0.7, generator=generator)
    attn.W_O[:, :, model.W_U.sum(1) == 0] = 0


@torch.no_grad()
def main(folder: Path, out: Path) -> None:
    tokens = load_file(out / "prompts.safetensors")["tokens"]
    before = tokens.clone()
    load = recipe(folder)
    model = load.load_model()
    plain = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not plain.unexpected_keys
    assert set(plain.missing_keys) <= {"blocks.0.attn.mask", "blocks.0.attn.IGNORE"}
    y_hat = load.predict(model, tokens)
    _, cache = model.run_with_cache(tokens.clone(), start_at_layer=0)
    model.reset_hooks()
    after_reset = load.predict(model, tokens)
    longer = torch.cat([tokens] * 3, dim=1)
    result = {
        "y_hat": y_hat,
        "after_reset": after_reset,
        "longer": load.predict(model, longer),
        "pattern": cache["pattern", 0],
    }
    # A hook that writes in place writes into the model's copy.
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda resid, hook: resid.zero_())]):
        assert not load.predict(model, tokens).any()
    assert torch.equal(tokens, before)

    give_other_weights(model)
    result["y_hat_other"] = load.predict(model, tokens)
    torch.save(model.state_dict(), out / "state.pt")
    save_file(
        {name: tensor.contiguous() for name, tensor in result.items()}, out / "y_hat.safetensors"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
