"""Files as other people's code writes them, made from known heads."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import msgpack
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.models.constructions.one_layer import one_layer
from mechinterp.models.weights import Weights
from tests.checkpoints import wild_files
from tests.conftest import by_head, changed

State = dict[str, Tensor]
LAYER_NAMES = (("query", "key", "value", "out"), ("q_proj", "k_proj", "v_proj", "out_proj"))


def random_heads(
    *, n_heads: int = 2, d_x: int = 3, d_y: int = 1, d_head: int | None = None, seed: int = 0
) -> Weights:
    """Heads with normal entries at the scale 1/sqrt(d_head); d_head is d_model if left out."""
    generator = torch.Generator().manual_seed(seed)
    d_model = d_x + d_y
    d_head = d_model if d_head is None else d_head

    def normal(*shape: int) -> Tensor:
        return torch.randn(n_heads, *shape, generator=generator)

    wide = [normal(d_model, d_head) for _ in range(3)]
    return one_layer(*wide, normal(d_head, d_y), scale=d_head**-0.5)


def biased(weights: Weights, seed: int = 1) -> Weights:
    """The same heads with normal biases."""
    generator = torch.Generator().manual_seed(seed)
    per_head = (weights.n_heads, weights.d_head)
    biases = {f"b_{x}": torch.randn(per_head, generator=generator) for x in "QKV"}
    return changed(weights, **biases, b_O=torch.randn(weights.d_y, generator=generator))


def softmax_paper_state(weights: Weights) -> State:
    """Rows of q, k, v and columns of o in blocks, a block for each head."""
    names = {"W_Q": "q", "W_K": "k", "W_V": "v"}
    rows = {x: torch.cat(list(getattr(weights, name)[0].mT)) for name, x in names.items()}
    rows["o"] = torch.cat([head.T for head in by_head(weights)["W_O"]], dim=1)
    return {f"attention_layer.{x}_proj.weight": matrix.contiguous() for x, matrix in rows.items()}


def whole_run(state: State, *, steps: int = 5) -> dict[str, object]:
    """The dictionary in which the softmax paper's code keeps a finished run."""
    losses = [0.5 / (step + 1) for step in range(steps)]
    return {
        "final_loss": losses[-1],
        "training_losses": losses,
        "validation_losses": losses[:1],
        "qk_dynamics": [[0.1, 0.2]],
        "ov_dynamics": [[0.3, 0.4]],
        "model": state,
    }


def merged_state(QK: Tensor, values: Tensor) -> State:
    """Merged linear attention: QK [head, query, key] and value matrices [head, out, in] of all heads."""
    return {"kq.weight": torch.cat(list(QK)), "value.weight": torch.cat(list(values))}


def separate_state(keys: Tensor, queries: Tensor, values: Tensor) -> State:
    """Linear attention of rank R: keys and queries [head, R, d_model], values [head, out, in]."""
    named = {"key": keys, "query": queries, "value": values}
    return {f"{name}.weight": torch.cat(list(tensor)) for name, tensor in named.items()}


def linear_output(tokens: Tensor, state: State, n_heads: int) -> Tensor:
    """What the linear paper's code computes, [batch, pos, d_model]: heads summed, no 1/N, no residual."""
    n = tokens.shape[-1]

    def split(name: str) -> Tensor:
        return (tokens @ state[name].T).unflatten(-1, (n_heads, -1)).transpose(1, 2)

    if "kq.weight" in state:
        scores = tokens[:, None] @ split("kq.weight").mT
    else:
        scores = split("query.weight") @ split("key.weight").mT
    assert split("value.weight").shape[-1] == n
    return (scores @ split("value.weight")).sum(1)


def arrays(weights: Weights) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in by_head(weights).items()}


def attention_module(weights_seed: int, *, width: int, n_heads: int, bias: bool) -> torch.nn.Module:
    """torch.nn.MultiheadAttention with normal weights and biases."""
    generator = torch.Generator().manual_seed(weights_seed)
    module = torch.nn.MultiheadAttention(width, n_heads, bias=bias, batch_first=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module.eval()


def linear_layers_state(module: torch.nn.Module, names: Sequence[str]) -> State:
    """torch.nn.MultiheadAttention as linear layers q, k, v and o of these names."""
    state = module.state_dict()
    layers = {}
    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in state:
            parts = (*state[f"in_proj_{kind}"].chunk(3), state[f"out_proj.{kind}"])
            layers |= {f"{n}.{kind}": part.clone() for n, part in zip(names, parts, strict=True)}
    return layers


def write_valid_files(folder: Path) -> dict[str, tuple[Path, dict[str, object]]]:
    """One small file of each one-layer format, and what `load` needs to read it."""
    square, narrow = random_heads(), random_heads(d_head=2, d_y=2)
    n, values = 4, torch.randn(2, 4, 4)
    module = attention_module(0, width=4, n_heads=2, bias=True)
    files: dict[str, tuple[Path, dict[str, object]]] = {
        "softmax-paper": (folder / "paper.pth", {}),
        "linear-merged": (folder / "merged.pt", {}),
        "linear-separate": (folder / "separate.bin", {}),
        "transformer-lens": (folder / "lens.pt", {}),
        "transformer-lens-safetensors": (folder / "lens.safetensors", {}),
        "torch-attention": (folder / "torch.pt", {"n_heads": 2}),
        "linear-layers": (folder / "layers.pt", {"n_heads": 2}),
        "arrays": (folder / "arrays.npz", {}),
        "circuits": (folder / "circuits.npz", {}),
        "arrays-safetensors": (folder / "arrays.safetensors", {}),
        "names": (folder / "names.ckpt", {}),
        "haiku": (folder / "haiku.pkl", {"n_heads": 2}),
        "flax": (folder / "flax.msgpack", {}),
    }
    path = {name: file for name, (file, _) in files.items()}
    torch.save(whole_run(softmax_paper_state(square)), path["softmax-paper"])
    torch.save(merged_state(torch.randn(2, n, n), values), path["linear-merged"])
    separate = separate_state(torch.randn(2, 1, n), torch.randn(2, 1, n), values)
    torch.save(separate, path["linear-separate"])
    torch.save(hooked_state(narrow, n_ctx=6), path["transformer-lens"])
    save_file(hooked_state(narrow, n_ctx=6), path["transformer-lens-safetensors"])
    torch.save(module.state_dict(), path["torch-attention"])
    torch.save(linear_layers_state(module, LAYER_NAMES[0]), path["linear-layers"])
    np.savez(path["arrays"], **arrays(biased(narrow)))
    np.savez_compressed(path["circuits"], QK=square.QK.numpy(), OV=square.OV.numpy())
    save_file(by_head(narrow), path["arrays-safetensors"])
    heads = wild_files.LAYOUTS["modules of heads"](square)
    torch.save({"model": heads, "loss": 1.0}, path["names"])
    flat = {name: tensor.numpy() for name, tensor in wild_files.LAYOUTS["haiku"](square).items()}
    path["haiku"].write_bytes(pickle.dumps({"params": flat, "step": 3}))
    three = {name: t.numpy() for name, t in wild_files.LAYOUTS["flax"](square).items()}
    packed = {x: msgpack.packb((a.shape, "float32", a.tobytes())) for x, a in three.items()}
    tree = {x: msgpack.ExtType(1, data) for x, data in packed.items()}
    path["flax"].write_bytes(msgpack.packb(tree))
    return files
