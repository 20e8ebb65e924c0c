"""Layouts that no code here was written for: each is read right, proven, or refused with a cure that works."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.modules.hooked import hook_module
from mechinterp.config.task import TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.predictor import predictor_of
from tests.checkpoints.files import saved
from tests.checkpoints.recordings import recorded

N_HEADS, WIDTH, D_HEAD, D_X, LENGTH = 2, 4, 3, 3, 8
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def projections(seed: int = 0) -> dict[str, Tensor]:
    """Matrices [out, in] of queries, keys, values and outputs."""
    inner = N_HEADS * D_HEAD
    shapes = {"q": (inner, WIDTH), "k": (inner, WIDTH), "v": (inner, WIDTH), "o": (WIDTH, inner)}
    return {x: drawn(*shape, seed=seed + i) / 2 for i, (x, shape) in enumerate(shapes.items())}


def heads_of(tokens: Tensor, matrix: Tensor) -> Tensor:
    return (tokens @ matrix.mT).unflatten(-1, (N_HEADS, -1)).transpose(1, 2)


def attended(tokens: Tensor, made: dict[str, Tensor], scale: float) -> Tensor:
    """Softmax attention of all tokens to all tokens, in plain torch."""
    q, k, v = (heads_of(tokens, made[x]) for x in "qkv")
    out = ((q @ k.mT) * scale).softmax(-1) @ v
    return out.transpose(1, 2).flatten(-2) @ made["o"].mT


def tokens_of(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
    pairs = torch.cat([x, y[..., None]], -1)
    query = torch.cat([x_query, torch.zeros(len(x), 1)], -1)
    return torch.cat([pairs, query[:, None]], 1)


def one_layer(made: dict[str, Tensor], scale: float = D_HEAD**-0.5) -> Predict:
    return lambda x, y, x_query: attended(tokens_of(x, y, x_query), made, scale)[:, -1, -1:]


def assert_theirs(checkpoint: Checkpoint, predict: Predict) -> None:
    """The reading gives the predictions of their code on prompts that were not recorded."""
    prompts = draw_prompts(checkpoint.task, 16, seed=5)
    ours = predictor_of(checkpoint.weights).predict(prompts)
    theirs = predict(prompts.x, prompts.y[..., 0], prompts.x_query)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_packed_per_head_in_unknown_wrappers_of_a_compiled_model(tmp_path: Path):
    made = projections()
    rows = [made[x].unflatten(0, (N_HEADS, -1)) for x in "qkv"]
    state = {"mixer.query_key_value.weight": torch.stack(rows, 1).flatten(0, 2), "mixer.dense.weight": made["o"]}  # fmt: skip
    wrapped = {"learner": {"policy": {f"_orig_mod.module.{n}": t for n, t in state.items()}}, "round": 7}  # fmt: skip
    batch = recorded(tmp_path / "batch.npz", one_layer(made), d_x=D_X, length=LENGTH)
    checkpoint = load(saved(tmp_path, wrapped), n_heads=N_HEADS, predictions=batch)
    assert checkpoint.proven
    assert_theirs(checkpoint, one_layer(made))


def test_a_scale_of_their_own_is_named_by_the_refusal_and_then_proven(tmp_path: Path):
    made, scale = projections(4), 0.37
    state = {f"head.W{x}.weight": made[x] for x in "qkvo"}
    batch = recorded(tmp_path / "batch.npz", one_layer(made, scale), d_x=D_X, length=LENGTH)
    file = saved(tmp_path, state)
    with pytest.raises(CheckpointError) as error:
        load(file, n_heads=N_HEADS, predictions=batch)
    named = re.search(r"explains .*--scale ([\d.]+)\.", str(error.value))
    assert named is not None, str(error.value)
    assert float(named[1]) == pytest.approx(scale, rel=1e-3)
    checkpoint = load(file, n_heads=N_HEADS, predictions=batch, scale=float(named[1]))
    assert_theirs(checkpoint, one_layer(made, scale))


def test_names_of_their_own_are_stated_and_then_proven(tmp_path: Path):
    made = projections(8)
    theirs = {"q": "asks", "k": "offers", "v": "carries", "o": "writes"}
    file = saved(tmp_path, {f"mixer.{theirs[x]}.weight": made[x] for x in "qkvo"})
    batch = recorded(tmp_path / "batch.npz", one_layer(made), d_x=D_X, length=LENGTH)
    with pytest.raises(CheckpointError, match="--map THEIRS=KNOWN") as error:
        load(file, n_heads=N_HEADS, predictions=batch)
    known = [f"{x}_proj" for x in "qkvo"]
    assert all(name in str(error.value) for name in known)
    stated = dict(zip(theirs.values(), known, strict=True))
    checkpoint = load(file, n_heads=N_HEADS, predictions=batch, map=stated)
    assert checkpoint.proven
    assert_theirs(checkpoint, one_layer(made))


class Reversed(nn.Module):
    """One matrix of values, keys and queries, in this order."""

    def __init__(self, made: dict[str, Tensor]) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * N_HEADS * D_HEAD, bias=False)
        self.out_proj = nn.Linear(N_HEADS * D_HEAD, WIDTH, bias=False)
        packed = torch.cat([made[x] for x in "vkq"])
        self.load_state_dict({"in_proj.weight": packed, "out_proj.weight": made["o"]})

    def forward(self, tokens: Tensor) -> Tensor:
        v, k, q = (
            part.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
            for part in self.in_proj(tokens).chunk(3, -1)
        )
        out = (q @ k.mT * D_HEAD**-0.5).softmax(-1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(-2))


def test_another_order_of_packing_is_not_proven_and_the_module_is_hooked(tmp_path: Path):
    made = projections(12)
    module = Reversed(made)
    batch = recorded(tmp_path / "batch.npz", one_layer(made), d_x=D_X, length=LENGTH)
    with pytest.raises(CheckpointError, match="hook_module"):
        load(saved(tmp_path, module.state_dict()), n_heads=N_HEADS, predictions=batch)
    task = TaskConfig(d_x=D_X, context_length=LENGTH)
    hooked = hook_module(module, task=task, n_heads=N_HEADS)
    prompts = draw_prompts(task, 16)
    expected = one_layer(made)(prompts.x, prompts.y[..., 0], prompts.x_query)
    torch.testing.assert_close(predictor_of(hooked).predict(prompts), expected)


def test_two_layers_of_parameters_per_head_with_an_embedding_are_proven(tmp_path: Path):
    width = 6
    read_in, read_out = drawn(width, WIDTH, seed=20) / 2, drawn(1, width, seed=21)
    layers = [
        {x: drawn(N_HEADS, width, D_HEAD, seed=30 + 4 * n + i) / 3 for i, x in enumerate("QKV")}
        | {"O": drawn(N_HEADS, D_HEAD, width, seed=50 + n) / 3}
        for n in range(2)
    ]

    def predict(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        stream = tokens_of(x, y, x_query) @ read_in.mT
        for made in layers:
            q, k, v = (torch.einsum("bld,hde->bhle", stream, made[x]) for x in "QKV")
            scores = (q @ k.mT) / stream.shape[1]
            stream = stream + torch.einsum("bhle,hed->bld", scores @ v, made["O"])
        return stream[:, -1] @ read_out.mT

    state = {f"trunk.{n}.mix.W_{x}": tensor for n, made in enumerate(layers) for x, tensor in made.items()}  # fmt: skip
    state |= {"embedding.weight": read_in, "regressor.weight": read_out}
    batch = recorded(tmp_path / "batch.npz", predict, d_x=D_X, length=LENGTH)
    checkpoint = load(saved(tmp_path, state), predictions=batch)
    assert checkpoint.weights.n_layers == 2
    assert checkpoint.proven
    assert_theirs(checkpoint, predict)


def test_one_layer_that_runs_twice_over_the_context_alone_is_proven(tmp_path: Path):
    """Keys are those of the context for every token, which counts as soon as the layer runs again."""
    width = 6
    read_in, read_out = drawn(width, WIDTH, seed=60) / 2, drawn(1, width, seed=61)
    made = {x: drawn(width, width, seed=62 + i) / 3 for i, x in enumerate("qkvo")}

    def predict(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        stream = tokens_of(x, y, x_query) @ read_in.mT
        for _ in range(2):
            q, k, v = (stream @ made[n].mT for n in "qkv")
            scores = q @ k[:, :-1].mT / (stream.shape[1] - 1)
            stream = stream + scores @ v[:, :-1] @ made["o"].mT
        return stream[:, -1] @ read_out.mT

    state = {f"loop.mixer.to_{x}.weight": tensor for x, tensor in made.items() if x != "o"}
    state |= {"loop.mixer.to_out.weight": made["o"], "input_proj.weight": read_in, "head.weight": read_out}  # fmt: skip
    files = [recorded(tmp_path / f"{n}.npz", predict, d_x=D_X, length=n) for n in (LENGTH, 5)]
    checkpoint = load(saved(tmp_path, state), n_heads=1, predictions=files)
    assert checkpoint.proven["model.passes"] == 2
    assert checkpoint.proven["model.context_keys"] is True
    assert "undetermined" not in checkpoint.assumed
    assert_theirs(checkpoint, predict)


def test_projections_in_a_list_of_heads_are_proven(tmp_path: Path):
    """W_q = ModuleList(one Linear per head), and one output projection."""
    made = projections(40)
    state = {f"att.W_{x}.{h}.weight": m for x in "qkv" for h, m in enumerate(made[x].unflatten(0, (N_HEADS, -1)))}  # fmt: skip
    file = saved(tmp_path, state | {"att.W_o.weight": made["o"]})
    batch = recorded(tmp_path / "batch.npz", one_layer(made), d_x=D_X, length=LENGTH)
    checkpoint = load(file, predictions=batch)
    assert checkpoint.weights.n_heads == N_HEADS
    assert_theirs(checkpoint, one_layer(made))


def test_a_list_that_may_be_of_heads_or_of_layers_is_asked_for(tmp_path: Path):
    """Without an output projection nothing shows which; stated, it is read as either."""
    state = {f"{x}.{n}.weight": drawn(WIDTH, WIDTH, seed=10 * n + i) / 2 for n in range(2) for i, x in enumerate(("query", "key", "value"))}  # fmt: skip
    file = saved(tmp_path, state)
    with pytest.raises(CheckpointError) as error:
        load(file)
    named = re.search(r"--map (\w+\.\d)=(heads\.\d\.\w+) or", str(error.value))
    assert named is not None
    assert named.groups() == ("query.0", "heads.0.q_proj")
    known = {f"{x}.{n}": f"heads.{n}.{x[0]}_proj" for n in range(2) for x in ("query", "key", "value")}  # fmt: skip
    checkpoint = load(file, map=known, score="linear", scale=1.0)
    assert checkpoint.weights.n_heads == 2
    expected = [state[f"query.{n}.weight"].mT @ state[f"key.{n}.weight"] for n in range(2)]
    torch.testing.assert_close(checkpoint.weights.QK, torch.stack(expected))


def test_a_norm_under_a_name_of_its_own_is_stated_as_the_message_says(tmp_path: Path):
    """As flax writes it: one packed matrix with biases behind a norm of another name, residual kept."""
    inner = N_HEADS * D_HEAD
    qkv, bias = drawn(WIDTH, 3 * inner, seed=20) / 2, drawn(3 * inner, seed=21) / 3
    out, last = drawn(inner, WIDTH, seed=22) / 2, drawn(WIDTH, seed=23) / 3
    scale, shift = 1 + drawn(WIDTH, seed=24) / 3, drawn(WIDTH, seed=25) / 3

    def predict(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        stream = tokens_of(x, y, x_query)
        read = torch.nn.functional.layer_norm(stream, (WIDTH,), scale, shift, eps=1e-6)
        q, k, v = (p.unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for p in (read @ qkv + bias).chunk(3, -1))  # fmt: skip
        z = (q @ k.mT * D_HEAD**-0.5).softmax(-1) @ v
        return (stream + z.transpose(1, 2).flatten(-2) @ out + last)[:, -1, -1:]

    path = "layers/0/self_attention"
    arrays = {f"{path}/qkv/kernel": qkv, f"{path}/qkv/bias": bias, f"{path}/out/kernel": out, f"{path}/out/bias": last, "layers/0/norm_pre/scale": scale, "layers/0/norm_pre/bias": shift}  # fmt: skip
    np.savez(tmp_path / "w.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "w.npz", n_heads=N_HEADS)
    named = re.search(r"--map (\w+)=(\w+) \(before attention\)", str(error.value))
    assert named is not None
    batch = recorded(tmp_path / "batch.npz", predict, d_x=D_X, length=LENGTH)
    checkpoint = load(tmp_path / "w.npz", n_heads=N_HEADS, map={named[1]: named[2]}, predictions=batch)  # fmt: skip
    assert checkpoint.proven["model.norm"] == "before"
    assert_theirs(checkpoint, predict)


def test_a_learned_temperature_is_set_aside_and_then_stated_as_the_messages_say(tmp_path: Path):
    made = projections(30)
    state = {f"mixer.{x}_proj.weight": tensor for x, tensor in made.items()}
    file = saved(tmp_path, state | {"mixer.log_temperature": torch.tensor([0.4])})
    scale = float(torch.tensor(0.4).exp()) * D_HEAD**-0.5
    batch = recorded(tmp_path / "batch.npz", one_layer(made, scale), d_x=D_X, length=LENGTH)
    options: dict = {"n_heads": N_HEADS, "predictions": batch}
    with pytest.raises(CheckpointError) as error:
        load(file, **options)
    dropped = re.search(r"--map (\S+)=unused", str(error.value))
    assert dropped is not None
    options["map"] = {dropped[1]: "unused"}
    with pytest.raises(CheckpointError) as error:
        load(file, **options)
    factor = re.search(r"a factor .* --scale ([\d.]+)\.", str(error.value))
    assert factor is not None
    assert float(factor[1]) == pytest.approx(scale, rel=1e-4)
    checkpoint = load(file, **options, scale=float(factor[1]))
    assert checkpoint.assumed["unused"] == ["mixer.log_temperature"]
    assert_theirs(checkpoint, one_layer(made, scale))


def test_two_layers_under_the_names_of_transformer_lens_are_proven(tmp_path: Path):
    """W_E reads numbers, W_U writes one; norms before causal attention and MLPs."""
    width, hidden, d_head = 8, 16, 4
    sizes = {"W_Q": (N_HEADS, width, d_head), "W_K": (N_HEADS, width, d_head), "W_V": (N_HEADS, width, d_head), "W_O": (N_HEADS, d_head, width)}  # fmt: skip
    state = {"embed.W_E": drawn(WIDTH, width, seed=1), "unembed.W_U": drawn(width, 1, seed=2), "unembed.b_U": drawn(1, seed=3), "ln_final.w": 1 + drawn(width, seed=4) / 3, "ln_final.b": drawn(width, seed=5) / 3}  # fmt: skip
    for n in range(2):
        layer = {f"attn.{x}": drawn(*size, seed=100 * n + i) / 2 for i, (x, size) in enumerate(sizes.items(), 10)}  # fmt: skip
        layer |= {"mlp.W_in": drawn(width, hidden, seed=100 * n + 20) / 3, "mlp.W_out": drawn(hidden, width, seed=100 * n + 21) / 3, "mlp.b_in": drawn(hidden, seed=100 * n + 22) / 3, "mlp.b_out": drawn(width, seed=100 * n + 23) / 3}  # fmt: skip
        layer |= {f"ln{i}.{x}": (x == "w") + drawn(width, seed=100 * n + 30 + 2 * i + (x == "w")) / 3 for i in (1, 2) for x in "wb"}  # fmt: skip
        state |= {f"blocks.{n}.{name}": tensor for name, tensor in layer.items()}

    def normed(stream: Tensor, name: str) -> Tensor:
        return torch.nn.functional.layer_norm(stream, (width,), state[f"{name}.w"], state[f"{name}.b"])  # fmt: skip

    def predict(x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        stream = tokens_of(x, y, x_query) @ state["embed.W_E"]
        later = torch.ones(2 * [stream.shape[1]], dtype=torch.bool).triu(1)
        for path in ("blocks.0.", "blocks.1."):
            read = normed(stream, f"{path}ln1")
            q, k, v = (torch.einsum("bld,hde->bhle", read, state[f"{path}attn.W_{x}"]) for x in "QKV")  # fmt: skip
            z = (q @ k.mT * d_head**-0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
            stream = stream + torch.einsum("bhle,hed->bld", z, state[f"{path}attn.W_O"])
            read = normed(stream, f"{path}ln2") @ state[f"{path}mlp.W_in"] + state[f"{path}mlp.b_in"]  # fmt: skip
            read = torch.nn.functional.gelu(read) @ state[f"{path}mlp.W_out"]
            stream = stream + read + state[f"{path}mlp.b_out"]
        return (normed(stream, "ln_final") @ state["unembed.W_U"] + state["unembed.b_U"])[:, -1]

    batch = recorded(tmp_path / "batch.npz", predict, d_x=D_X, length=LENGTH)
    checkpoint = load(saved(tmp_path, state), predictions=batch)
    assert checkpoint.weights.n_layers == 2
    assert checkpoint.proven["model.norm"] == "before"
    assert_theirs(checkpoint, predict)
