"""Pruned, normed and adapted weights, packed heads and the code of Ahn et al., each compared with the plain weights."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from mechinterp.checkpoints.foreign.tensors.folded import folded
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from tests.checkpoints.files import assert_refused, assert_same_circuits, loaded, saved
from tests.checkpoints.foreign_files import LAYOUTS, State, random_heads
from tests.checkpoints.recordings import recorded

HEADS = random_heads()
STATE = LAYOUTS["modules {x}_proj"](HEADS)
ALONE = {"n_heads": 2, "score": "softmax", "scale": 0.5, "columns": "x,y", "attend_to_self": False, "sign": "plus", "model": {"positions": "none"}}  # fmt: skip


def modules() -> nn.ModuleDict:
    """The four projections as modules."""
    shapes = {name.split(".")[1]: tensor.shape for name, tensor in STATE.items()}
    made = nn.ModuleDict({n: nn.Linear(size[1], size[0], bias=False) for n, size in shapes.items()})
    # No row is zero, since weight_norm divides by the norm of a row.
    made.load_state_dict(
        {name.removeprefix("attn."): tensor + 0.1 for name, tensor in STATE.items()}
    )
    return made


def pruned(module: nn.Linear) -> None:
    prune.l1_unstructured(module, "weight", 0.3)


def normed(module: nn.Linear) -> None:
    parametrizations.weight_norm(module)
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(1.5)


def old_normed(module: nn.Linear) -> None:
    """As the old torch.nn.utils.weight_norm stores it."""
    module.weight_g = nn.Parameter(1.5 * module.weight.detach().norm(dim=1, keepdim=True))
    module.weight_v = nn.Parameter(module.weight.detach() * 3)
    weight = 1.5 * module.weight.detach()
    del module.weight
    module.weight = weight


def spectral(module: nn.Linear) -> None:
    parametrizations.spectral_norm(module)


def old_spectral(module: nn.Linear) -> None:
    """By the old torch.nn.utils.spectral_norm, whose vectors are buffers."""
    nn.utils.spectral_norm(module)
    module(torch.randn(2, module.in_features))  # a step of its power iteration


def of_one_length(module: nn.Linear) -> None:
    """weight_norm with one length for the whole matrix."""
    parametrizations.weight_norm(module, dim=None)
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(1.5)


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm:DeprecationWarning")
@pytest.mark.parametrize(
    "change", [pruned, normed, of_one_length, old_normed, spectral, old_spectral]
)
def test_a_changed_weight_is_folded(tmp_path: Path, change: Callable[[nn.Linear], None]):
    made = modules()
    for module in made.values():
        change(module)
    made.eval()
    for module in made.values():
        module(torch.zeros(1, module.in_features))  # the old tools make the weight when it runs
    plain = {f"attn.{name}.weight": module.weight.detach() for name, module in made.items()}
    assert not torch.equal(plain["attn.q_proj.weight"], STATE["attn.q_proj.weight"])
    expected = loaded(tmp_path, plain, **ALONE).weights
    state = {f"attn.{name}": tensor for name, tensor in made.state_dict().items()}
    actual = loaded(tmp_path, state, **ALONE).weights
    torch.testing.assert_close(actual.QK, expected.QK)
    torch.testing.assert_close(actual.OV, expected.OV)


def test_rows_of_one_entry_keep_a_length_each():
    direction, length = torch.tensor([[2.0], [-4.0]]), torch.tensor([[3.0], [5.0]])
    state = {"q.weight_g": length, "q.weight_v": direction}
    assert folded(state, {})["q.weight"].tolist() == [[3.0], [-5.0]]


@pytest.mark.filterwarnings("ignore:.*_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*_norm:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "gone"),
    [
        (nn.utils.spectral_norm, "weight_v"),
        (nn.utils.weight_norm, "weight_v"),
        (pruned, "weight_mask"),
        (parametrizations.spectral_norm, "parametrizations.weight.0._u"),
        (parametrizations.weight_norm, "parametrizations.weight.original1"),
    ],
)
def test_a_changed_weight_that_lacks_a_tensor_names_the_tool_that_writes_the_plain_one(
    tmp_path: Path, change: Callable[[nn.Linear], object], gone: str
):
    made = modules()
    change(made["q_proj"])
    made["q_proj"].eval()(torch.zeros(1, made["q_proj"].in_features))
    weight = made["q_proj"].weight.detach().clone()
    state = {f"attn.{n}": t for n, t in made.state_dict().items() if n != f"q_proj.{gone}"}
    message = assert_refused("changed weight", loaded, tmp_path, state, **ALONE)
    assert "--map" not in message
    calls = re.findall(r"(torch\.nn\.utils\.[\w.]+\(.*?\))", message)
    for call in calls if change is not pruned else calls[1:]:
        if change is pruned or "prune" not in call:
            eval(call, {"torch": torch, "module": made["q_proj"]})
    cured = {f"attn.{name}": tensor for name, tensor in made.state_dict().items()}
    torch.testing.assert_close(cured["attn.q_proj.weight"], weight)
    assert_same_circuits(loaded(tmp_path, cured, **ALONE).weights, loaded(tmp_path, {f"attn.{n}.weight": m.weight.detach() for n, m in made.items()}, **ALONE).weights)  # fmt: skip


def test_a_lora_is_added_with_the_scale_of_its_config(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    state, plain = {}, {}
    for name, tensor in STATE.items():
        stem = name.removesuffix(".weight")
        A, B = (torch.randn(2, tensor.shape[1], generator=generator), torch.randn(tensor.shape[0], 2, generator=generator))  # fmt: skip
        state[f"base_model.model.{stem}.base_layer.weight"] = tensor
        state[f"base_model.model.{stem}.lora_A.default.weight"] = A
        state[f"base_model.model.{stem}.lora_B.default.weight"] = B
        plain[name] = tensor + 8 / 2 * B @ A
    assert_refused("merge_and_unload", loaded, tmp_path, state, **ALONE)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
    actual = loaded(tmp_path, state, **ALONE).weights
    (tmp_path / "adapter_config.json").unlink()
    expected = loaded(tmp_path, plain, **ALONE).weights
    torch.testing.assert_close(actual.QK, expected.QK)
    torch.testing.assert_close(actual.OV, expected.OV)


# Packing of queries, keys and values per head, as in GPT-NeoX.


def per_head(name: str) -> State:
    rows = [STATE[f"attn.{x}_proj.weight"].unflatten(0, (2, -1)) for x in "qkv"]
    packed = torch.stack(rows, 1).flatten(0, 2)
    return {f"attn.{name}.weight": packed, "attn.out_proj.weight": STATE["attn.out_proj.weight"]}


def test_packing_per_head_is_stated_known_by_its_name_or_proven(tmp_path: Path):
    stated = ALONE | {"model": {"positions": "none", "packing": "per_head"}}
    for name, hints in (("qkv", stated), ("query_key_value", ALONE)):
        weights = loaded(tmp_path, per_head(name), **hints).weights
        torch.testing.assert_close(weights.QK, HEADS.QK)
        torch.testing.assert_close(weights.OV, HEADS.OV)
    file = saved(tmp_path, per_head("qkv"))
    other = load(file, **ALONE)
    assert other.assumed["model.packing"] == "whole"  # no reading of random weights predicts
    batch = recorded(tmp_path / "batch.npz", theirs, d_x=3, length=8)
    proven = load(file, n_heads=2, predictions=batch)
    assert proven.proven["model.packing"] == "per_head"
    torch.testing.assert_close(proven.weights.OV, HEADS.OV)


def theirs(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
    """Predictions of one softmax layer in plain torch."""
    tokens = torch.cat([x, y[..., None]], -1)
    query = torch.cat([x_query, torch.zeros(len(x), 1)], -1)
    scores = torch.einsum("bi,hij,blj->bhl", query, HEADS.QK, tokens)
    return torch.einsum("bhl,bli,hio->bo", scores.softmax(-1), tokens, HEADS.OV)


# The code of Ahn et al.


def linear_transformer(every: Tensor, x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
    """Minus the last entry of the stream after all layers, as the code of Ahn et al. computes it."""
    tokens = torch.cat([torch.cat([x, x_query[:, None]], 1), torch.cat([y, 0 * y[:, :1]], 1)[..., None]], -1)  # fmt: skip
    n_pairs, n = x.shape[1], every.shape[-1]
    mask = torch.eye(n_pairs + 1, dtype=x.dtype)
    mask[-1, -1] = 0
    for layer in every:
        added = 0
        for P, Q in layer:
            if n == x.shape[2]:
                P = nn.functional.pad(P, (0, 1, 0, 1))
                P[-1, -1] = 1
                Q = nn.functional.pad(Q, (0, 1, 0, 1))
            attention = torch.einsum("bni,ij,bmj->bnm", tokens, Q, tokens)
            keys = torch.einsum("ij,bnj->bni", P, tokens)
            added = added + torch.einsum("bnm,ml,bli->bni", attention, mask, keys) / n_pairs
        tokens = tokens + added
    return -tokens[:, -1, -1:]


@pytest.mark.parametrize(("n_layers", "n_heads", "n"), [(1, 1, 3), (3, 1, 3), (2, 2, 4)])
def test_allparam_predicts_as_its_code_does(tmp_path: Path, n_layers: int, n_heads: int, n: int):
    generator = torch.Generator().manual_seed(n_layers)
    every = torch.randn(n_layers, n_heads, 2, n, n, generator=generator) / 4
    checkpoint = loaded(tmp_path, {"allparam": every}, d_x=3)
    assert (checkpoint.weights.n_layers, checkpoint.weights.n_heads) == (n_layers, n_heads)
    assert checkpoint.task.context_length == 20
    prompts = draw_prompts(checkpoint.task, 64, dtype=torch.float64)
    ours = predictor_of(checkpoint.weights.to(torch.float64)).predict(prompts)
    expected = linear_transformer(every.double(), prompts.x, prompts.y[..., 0], prompts.x_query)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert_refused("d_x must be", loaded, tmp_path, {"allparam": every})
    predict = partial(linear_transformer, every)
    batch = recorded(tmp_path / "batch.npz", predict, d_x=3, length=8)
    proof = load(saved(tmp_path, {"allparam": every}), d_x=3, predictions=batch)
    assert "exactly" in str(proof.proven["predictions"])
    assert "undetermined" not in proof.assumed
    if n_heads == 1:
        apart = {f"layers.{i}.{x}": every[i, 0, j] for i in range(n_layers) for j, x in enumerate("PQ")}  # fmt: skip
        other = loaded(tmp_path, apart, d_x=3).weights.to(torch.float64)
        torch.testing.assert_close(predictor_of(other).predict(prompts), ours)


def test_the_last_matrices_of_a_run_are_read(tmp_path: Path):
    """As the code of Ahn et al. saves its runs: lists of matrices by the settings of a run."""
    runs = {("adam", n): [torch.randn(2, 1, 2, 4, 4) for _ in range(3)] for n in range(2)}
    other = loaded(tmp_path, {"allparam": runs["adam", 1][-1]}, d_x=3).weights
    one = loaded(
        tmp_path, {"hist_dict": {(0,): runs["adam", 1]}, "loss_dict": {(0,): [0.5]}}, d_x=3
    )
    assert_same_circuits_of_layers(one.weights, other)
    assert one.assumed["weights"] == "the last of 3 that were saved"
    file = saved(tmp_path, {"hist_dict": runs})
    named = re.search(r"such as --weights (\S+) ", assert_refused("2 runs", load, file, d_x=3))
    assert named is not None
    assert named[1] == "adam,0"
    assert_same_circuits_of_layers(load(file, d_x=3, weights="adam,1").weights, other)
    assert_refused("one of adam,0, adam,1", load, file, d_x=3, weights="sgd")


def assert_same_circuits_of_layers(actual: Weights, expected: Weights) -> None:
    assert actual.by_name.keys() == expected.by_name.keys()
    for name, tensor in expected.by_name.items():
        torch.testing.assert_close(actual.by_name[name], tensor)


# Word models, and refusals whose offers help.


def test_words_are_found_before_layers_are_counted(tmp_path: Path):
    state = {"embed.W_E": torch.randn(33, 8)}
    for layer in range(2):
        state |= {f"blocks.{layer}.attn.W_{x}": torch.randn(2, 8, 4) for x in "QKV"}
        state[f"blocks.{layer}.attn.W_O"] = torch.randn(2, 4, 8)
    assert "--map" not in assert_refused("word tokens", loaded, tmp_path, state)


def of_a_stream(width: int, ends: State) -> State:
    """One layer of attention between these tensors."""
    generator = torch.Generator().manual_seed(3)
    made = {f"layers.0.attn.{x}_proj.weight": torch.randn(width, width, generator=generator) / width for x in "qkvo"}  # fmt: skip
    return made | ends


IN_STREAM = {"n_heads": 2, "score": "softmax", "attend_to_self": True, "model": {"residual": True, "positions": "none"}}  # fmt: skip


@pytest.mark.parametrize("d_token", [4, 8])
def test_an_embedding_that_reads_numbers_is_a_read_in_whatever_its_name(
    tmp_path: Path, d_token: int
):
    """Where both sizes are those of the stream, one output is no word of eight."""
    ends = {"read_in.weight": torch.randn(8, d_token), "read_out.weight": torch.randn(1, 8)}
    expected = loaded(tmp_path, of_a_stream(8, ends), **IN_STREAM)
    renamed = {"token_embedding.weight": ends["read_in.weight"], "head.weight": ends["read_out.weight"]}  # fmt: skip
    actual = loaded(tmp_path, of_a_stream(8, renamed), **IN_STREAM)
    assert actual.task.d_x == d_token - 1
    prompts = draw_prompts(expected.task, 32)
    torch.testing.assert_close(
        predictor_of(actual.weights).predict(prompts),
        predictor_of(expected.weights).predict(prompts),
    )


def test_a_matrix_of_numbers_under_the_name_of_words_is_read_once_that_is_stated(tmp_path: Path):
    """W_E [entries, width], as HookedTransformer orders it, may be a table of as many words."""
    ends = {"read_in.weight": torch.randn(8, 4), "read_out.weight": torch.randn(1, 8)}
    expected = loaded(tmp_path, of_a_stream(8, ends), **IN_STREAM)
    lens = {"embed.W_E": ends["read_in.weight"].T, "unembed.W_U": ends["read_out.weight"].T}
    file = saved(tmp_path, of_a_stream(8, {n: t.contiguous() for n, t in lens.items()}))
    message = assert_refused("reads numbers", load, file, **IN_STREAM)
    option = re.search(r"--map (\S+)=(\w+)", message)
    assert option is not None
    actual = load(file, **IN_STREAM, map={option[1]: option[2]})
    assert actual.task.d_x == 3
    prompts = draw_prompts(expected.task, 32)
    torch.testing.assert_close(
        predictor_of(actual.weights).predict(prompts),
        predictor_of(expected.weights).predict(prompts),
    )
    turned = of_a_stream(8, {"embed.W_E": ends["read_in.weight"], "unembed.W_U": lens["unembed.W_U"]})  # fmt: skip
    assert loaded(tmp_path, turned, **IN_STREAM).task.d_x == 3
    words = {"embed.W_E": torch.randn(4, 8), "unembed.W_U": torch.randn(8, 3)}
    assert "--map" not in assert_refused("word tokens", loaded, tmp_path, of_a_stream(8, words), n_heads=2)  # fmt: skip


def test_a_table_with_an_output_for_each_row_is_one_of_words(tmp_path: Path):
    for n_words in (8, 50):
        ends = {"tok_emb.weight": torch.randn(n_words, 8), "head.weight": torch.randn(n_words, 8)}
        refused = assert_refused("word tokens", loaded, tmp_path, of_a_stream(8, ends), n_heads=2)
        assert "--map" not in refused


def test_a_table_of_words_beside_a_read_in_is_named_as_unused(tmp_path: Path):
    ends = {"read_in.weight": torch.randn(8, 4), "read_out.weight": torch.randn(1, 8)}
    state = of_a_stream(8, ends)
    expected = loaded(tmp_path, state, **IN_STREAM)
    actual = loaded(tmp_path, state | {"wte.weight": torch.randn(50, 8)}, **IN_STREAM)
    assert actual.assumed["unused"] == ["wte.weight"]
    assert "unused" not in expected.assumed
    prompts = draw_prompts(expected.task, 32)
    torch.testing.assert_close(
        predictor_of(actual.weights).predict(prompts),
        predictor_of(expected.weights).predict(prompts),
    )
