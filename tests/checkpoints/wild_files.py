"""One attention layer under every spelling that the table of names has, from heads whose label is known."""

from collections.abc import Callable

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.names import PROJECTIONS, ROWS, WORDS
from mechinterp.models.weights import Weights

State = dict[str, Tensor]


def matrices(weights: Weights) -> State:
    """q, k, v [head * d_head, d_model] and o [d_model, head * d_head], as four torch.nn.Linear hold them."""
    rows = {
        x: getattr(weights, f"W_{x.upper()}")[0].mT.flatten(0, 1).contiguous().clone()
        for x in "qkv"
    }
    return rows | {"o": weights.W_O[0].flatten(0, 1).mT.contiguous()}


def spelled(row: str, x: str) -> str:
    word, words = WORDS[x]
    return row.format(x=x, X=x.upper(), word=word, words=words, Word=word.capitalize())


def linear_layers(row: str, out: str, path: str = "attn.") -> Callable[[Weights], State]:
    def write(weights: Weights) -> State:
        rows = matrices(weights)
        names = {x: spelled(row, x) for x in "qkv"} | {"o": out}
        return {f"{path}{names[x]}.weight": matrix for x, matrix in rows.items()}

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


OUT = {row: "out_proj" for row in PROJECTIONS}
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
