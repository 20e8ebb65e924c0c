"""Files as other people's code writes them, made from known heads."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.foreign.tensors.names import PROJECTIONS, ROWS, WORDS
from mechinterp.checkpoints.native.exchange import hooked_state
from mechinterp.models.constructions.one_layer import one_layer
from mechinterp.models.weights import Weights
from tests.conftest import by_head, changed

State = dict[str, Tensor]


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


def attention_module(weights_seed: int, *, width: int, n_heads: int, bias: bool) -> torch.nn.Module:
    """torch.nn.MultiheadAttention with normal weights and biases."""
    generator = torch.Generator().manual_seed(weights_seed)
    module = torch.nn.MultiheadAttention(width, n_heads, bias=bias, batch_first=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module.eval()


def matrices(weights: Weights) -> State:
    """q, k, v [head * d_head, d_model] and o [d_model, head * d_head], as four torch.nn.Linear hold them."""
    rows = {
        x: getattr(weights, f"W_{x.upper()}")[0].mT.flatten(0, 1).contiguous().clone()
        for x in "qkv"
    }
    return rows | {"o": weights.W_O[0].flatten(0, 1).mT.contiguous()}


def bias_rows(weights: Weights) -> State:
    """The biases of these four, if there are any."""
    if not weights.model.biases:
        return {}
    tensors = {x: weights.tensors[f"attn.b_{x.upper()}"] for x in "qkvo"}
    return {x: tensor.flatten() for x, tensor in tensors.items()}


def spelled(row: str, x: str) -> str:
    word, words = WORDS[x]
    return row.format(x=x, X=x.upper(), word=word, words=words, Word=word.capitalize())


def linear_layers(row: str, out: str, path: str = "attn.") -> Callable[[Weights], State]:
    def write(weights: Weights) -> State:
        names = {x: spelled(row, x) for x in "qkv"} | {"o": out}
        kinds = {"weight": matrices(weights), "bias": bias_rows(weights)}
        return {
            f"{path}{names[x]}.{kind}": t for kind, rows in kinds.items() for x, t in rows.items()
        }

    return write


def parameters(row: str, out: str, *, turned: bool) -> Callable[[Weights], State]:
    """Bare parameters [in, out], or [out, in] where turned."""

    def write(weights: Weights) -> State:
        rows = matrices(weights)
        names = {x: spelled(row, x) for x in "qkv"} | {"o": out}
        return {
            names[x]: (matrix if turned else matrix.T).contiguous() for x, matrix in rows.items()
        }

    return write


def packed(name: str, out: str, *, turned: bool = False) -> Callable[[Weights], State]:
    """Queries, keys and values in one matrix, [3 width, in], or GPT-2's [in, 3 width] where turned."""

    def write(weights: Weights) -> State:
        rows = matrices(weights)
        qkv = torch.cat([rows[x] for x in "qkv"])
        state = {f"attn.{name}.weight": qkv, f"attn.{out}.weight": rows["o"]}
        return {n: (t.T if turned else t).contiguous() for n, t in state.items()}

    return write


def queries_and_packed(name: str) -> Callable[[Weights], State]:
    def write(weights: Weights) -> State:
        rows = matrices(weights)
        kv = torch.cat([rows["k"], rows["v"]])
        return {"to_q.weight": rows["q"], f"{name}.weight": kv, "to_out.0.weight": rows["o"]}

    return write


def modules_per_head(
    row: str, out: str, path: str = "attn.heads.{h}."
) -> Callable[[Weights], State]:
    """A module per head, and one output projection over all of them."""

    def write(weights: Weights) -> State:
        state = {}
        for h in range(weights.n_heads):
            for x in "qkv":
                W = getattr(weights, f"W_{x.upper()}")[0, h]
                state[f"{path.format(h=h)}{spelled(row, x)}.weight"] = W.mT.contiguous()
        return state | {f"attn.{out}.weight": matrices(weights)["o"]}

    return write


def outputs_per_head(weights: Weights) -> State:
    """heads.{h}.W_Q.weight, ..., heads.{h}.W_O.weight: the heads' outputs are added."""
    state = modules_per_head("W_{X}", "unused", "heads.{h}.")(weights)
    del state["attn.unused.weight"]
    for h, W_O in enumerate(weights.W_O[0]):
        state[f"heads.{h}.W_O.weight"] = W_O.mT.contiguous()
    return state


def three_axes(weights: Weights) -> State:
    """Flax: query [in, head, d_head], out [head, d_head, in]."""
    names = {"query": "W_Q", "key": "W_K", "value": "W_V"}
    path = "params.MultiHeadDotProductAttention_0"
    state = {
        f"{path}.{n}.kernel": getattr(weights, W)[0].transpose(0, 1).contiguous()
        for n, W in names.items()
    }
    return state | {f"{path}.out.kernel": weights.W_O[0].contiguous()}


def haiku(weights: Weights) -> State:
    """transformer/multi_head_attention/query.w [in, out], with minus the prediction at the y entry."""
    rows = matrices(weights)
    names = {"q": "query", "k": "key", "v": "value", "o": "linear"}
    path = "transformer/multi_head_attention"
    return {
        f"{path}/{names[x]}/w": ((-1 if x == "o" else 1) * matrix.T).contiguous()
        for x, matrix in rows.items()
    }


def annotated(weights: Weights) -> State:
    rows = matrices(weights)
    return {f"linears.{i}.weight": rows[x] for i, x in enumerate("qkvo")}


def multihead(weights: Weights) -> State:
    """torch.nn.MultiheadAttention with one matrix of queries, keys and values."""
    state = {}
    for kind, rows in (("weight", matrices(weights)), ("bias", bias_rows(weights))):
        if rows:
            state[f"attn.in_proj_{kind}"] = torch.cat([rows[x] for x in "qkv"])
            state[f"attn.out_proj.{kind}"] = rows["o"]
    return state


def multihead_apart(weights: Weights) -> State:
    """The same with keys or values of another width, which it keeps in three matrices."""
    rows = matrices(weights)
    return {f"{x}_proj_weight": rows[x] for x in "qkv"} | {"out_proj.weight": rows["o"]}


def softmax_paper_state(weights: Weights) -> State:
    """The softmax paper's code: rows of q, k, v and columns of o in blocks of heads; o has d_y rows."""
    rows = matrices(weights) | {"o": by_head(weights)["W_O"].flatten(0, 1).mT.contiguous()}
    return {f"attention_layer.{x}_proj.weight": matrix for x, matrix in rows.items()}


def merged(weights: Weights) -> State:
    """The linear paper's code with one matrix per head for queries and keys, and values that are outputs."""
    values = pad(weights.OV, (weights.d_x, 0)).mT
    return {"kq.weight": weights.QK.flatten(0, 1), "value.weight": values.flatten(0, 1)}


def separate(weights: Weights) -> State:
    """The same with keys and queries of low rank."""
    rows = matrices(weights)
    named = {"key.weight": rows["k"], "query.weight": weights.scale * rows["q"]}
    return named | {"value.weight": merged(weights)["value.weight"]}


def whole_tokens(weights: Weights) -> State:
    """Tensors [head, ...] that write whole tokens."""
    return {name.removeprefix("attn."): tensor[0] for name, tensor in weights.tensors.items()}


def circuits(weights: Weights) -> State:
    """QK without its scale, and OV, which writes whole tokens."""
    return {"QK": weights.W_Q[0] @ weights.W_K[0].mT, "OV": weights.W_V[0] @ weights.W_O[0]}


def narrow_circuits(weights: Weights) -> State:
    return circuits(weights) | {"OV": weights.OV}


def four_of_lens(weights: Weights) -> State:
    """The attention of a HookedTransformer alone, whose output is as wide as a token."""
    state = hooked_state(weights, n_ctx=6)
    return {name: state[name] for name in (f"blocks.0.attn.W_{x}" for x in "QKVO")}


def arrays(weights: Weights) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in by_head(weights).items()}


NARROW = {"y_first": False, "minus": False, "factor": 1.0}
"""Layouts that write y entries alone have one order of columns, one sign and no factor."""
SOFTMAX = {"score": "softmax", "scale": None}
LINEAR = NARROW | {"score": "linear", "scale": None, "to_self": True, "hints": {"format": "linear-paper"}}  # fmt: skip
FORMATS: dict[str, tuple[Callable[[Weights], State], str, dict[str, object]]] = {
    "paper": (
        softmax_paper_state,
        "softmax-paper",
        NARROW | SOFTMAX | {"to_self": False, "wide": True},
    ),
    "merged": (merged, "linear-paper", LINEAR),
    "separate": (separate, "linear-paper", LINEAR),
    "multihead": (multihead, "torch-attention", SOFTMAX | {"minus": False}),
    "multihead, apart": (multihead_apart, "torch-attention", SOFTMAX | {"minus": False}),
    "arrays": (whole_tokens, "arrays", {}),
    "narrow arrays": (by_head, "arrays", NARROW),
    "circuits": (circuits, "arrays", {"scale": 1.0}),
    "narrow circuits": (narrow_circuits, "arrays", NARROW | {"scale": 1.0}),
    "lens": (lambda weights: hooked_state(weights, n_ctx=6), "transformer-lens", NARROW),
    "four of lens": (four_of_lens, "transformer-lens", NARROW),
}
"""Formats whose names state something: how each is written, its name, and what it settles; scale None: the head's own."""
LAYOUTS: dict[str, Callable[[Weights], State]] = {
    **{f"modules {row}": linear_layers(row, "out_proj") for row in PROJECTIONS},
    **{f"output {out}": linear_layers("to_{x}", out) for out in ROWS["o"]},
    **{f"packed {name}": packed(name, "proj") for name in ROWS["qkv"]},
    **{f"Conv1D {name}": packed(name, "c_proj", turned=True) for name in ROWS["qkv"]},
    **{f"packed {name}": queries_and_packed(name) for name in ROWS["kv"]},
    "parameters [in, out]": parameters("W{x}", "Wo", turned=False),
    "parameters [out, in]": parameters("w_{x}", "w_o", turned=True),
    "a list of modules": annotated,
    "modules of heads": modules_per_head("{word}", "proj"),
    "modules of heads, W_Q": modules_per_head("W_{X}", "W_O", "attn.heads.{h}."),
    "numbered heads": modules_per_head("{word}", "proj", "attn.head_{h}."),
    "outputs of heads": outputs_per_head,
    "behind a layer": linear_layers("{x}_linear", "out", "layers.0.self_attn."),
    "behind module": linear_layers("W_{x}", "W_o", "module._orig_mod.encoder.attn."),
    "flax": three_axes,
    "haiku": haiku,
}
