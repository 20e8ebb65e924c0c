"""Files that a stranger's code wrote: no number without a word where something was guessed."""

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.analysis.ablation.single import ablate
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign import score
from mechinterp.checkpoints.foreign.names import copies_in
from mechinterp.checkpoints.foreign.settings import settled
from mechinterp.checkpoints.io.errors import NotUnderstoodError
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.general import Attend, predictions
from tests.checkpoints.files import assert_refused, read, saved
from tests.checkpoints.foreign_files import random_heads
from tests.checkpoints.strangers import D_X, TASK, Kind, Stranger, drawn, trained
from tests.checkpoints.wild_files import LAYOUTS
from tests.conftest import Run, sampled

STATE = LAYOUTS["modules {x}_proj"](random_heads())
"""Two heads in names that do not say how many."""


def prediction(checkpoint: Checkpoint, model: Stranger) -> tuple[Tensor, Tensor]:
    """Predictions of what was read and of the stranger's own module, on the same prompts."""
    x, y, x_query, target = drawn(64, torch.Generator().manual_seed(3))
    column = target[:, None]
    prompts = Prompts(x, y[..., None], x_query, column, column, torch.zeros(64, D_X, 1))
    with torch.no_grad():
        return checkpoint.model.predict(prompts)[:, 0], model(x, y, x_query)


JOINS = {"layout": "pairs", "residual": True, "positions": "none", "passes": 1}
PLAIN = {"n_heads": 2, "task": TASK, "score": "softmax", "attend_to_self": True, "scale": 0.5, "model": JOINS}  # fmt: skip
"""A reading that leaves nothing open."""
ALONE = {"score": "softmax", "scale": 0.5, "columns": "x,y", "attend_to_self": False, "sign": "plus", "model": {"positions": "none"}}  # fmt: skip
"""The same for one layer of attention alone."""
STATED = {"layout": "pairs", "context_only": False, "residual": True, "activation": "gelu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stated"),
    [
        (Kind(positions="halves", base=50.0), {"positions": "rotary", "rotary_base": 50.0}),
        (Kind(2, positions="adjacent"), {"positions": "rotary", "rotary_adjacent_pairs": True}),
        (Kind(2, norm="rms", mlp=True), {"rms_norm": True, "norm": "before", "positions": "none"}),
        (Kind(passes=3, norm="layer", mlp=True), {"passes": 3, "norm": "before"}),
        (Kind(layout="in_turn", positions="learned"), {"layout": "in_turn"}),
        (Kind(2, positions="sines"), {"positions": "sinusoidal_halves"}),
        (Kind(2, norm="bare", mlp=True), {"norm": "before", "rms_norm": False}),
    ],
)
def test_a_stated_reading_is_the_strangers_own_function(tmp_path: Path, kind: Kind, stated: dict):
    model = Stranger(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(0))
    joins = {**STATED, "rotary_adjacent_pairs": False, **stated}
    if "positions" not in stated or stated["positions"] == "none":
        del joins["rotary_adjacent_pairs"]
    hints = {"n_heads": 2, "score": "softmax", "attend_to_self": True, "model": joins}
    checkpoint = read(saved(tmp_path, model.state_dict()), task=TASK, **hints)
    ours, theirs = prediction(checkpoint, model)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    sampled(
        [
            Kind(passes=2, positions="adjacent", norm="layer", mlp=True),
            Kind(2, layout="in_turn", positions="learned", norm="layer", mlp=True, steps=1500),
            Kind(2, norm="rms", mlp=True),
            Kind(2, norm="rms", mlp=True, positions="adjacent", base=100.0, steps=900, seed=5),
            Kind(2, norm="bare", mlp=True),
            Kind(2, norm="layer", mlp=True, positions="sines", activation="relu"),
            Kind(2, norm="layer", positions="halves", base=30.0, steps=900, seed=3),
            Kind(2, norm="layer", positions="halves", base=100.0, steps=1500),
            Kind(2, norm="layer", mlp=True, activation="silu", steps=1500),
            Kind(2, norm="layer", mlp=True, scale="width", activation="relu", steps=1500),
            Kind(passes=3, norm="layer", mlp=True),
        ],
        keep=lambda kind: kind.norm == "rms" and kind.positions == "adjacent",
    ),
)
def test_the_loss_tells_what_leaves_no_trace(tmp_path: Path, kind: Kind):
    """Rotary positions, runs through the layers, x and y in turn, norms without means.

    Readings that predict equally well are named with the option that decides.
    """
    model = trained(kind)
    checkpoint = load(saved(tmp_path, model.state_dict()), n_heads=2, task=TASK)
    ours, theirs = prediction(checkpoint, model)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    ties = any(each.ties for each in checkpoint.readings[1:])
    assert ("state --" in str(checkpoint.assumed.get("undetermined"))) is ties
    assert checkpoint.doubt == ""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_reading_that_training_would_have_bettered_is_doubted(tmp_path: Path, run: Run):
    """Attention and MLP side by side, which no reading has."""
    model = trained(Kind(2, norm="layer", mlp=True, parallel=True))
    path = saved(tmp_path, model.state_dict())
    checkpoint = load(path, n_heads=2, task=TASK)
    assert "in doubt" in checkpoint.doubt
    law = tmp_path / "task.json"
    law.write_text(json.dumps(TASK))
    shown = run("ablate", path, "--n-heads", 2, "--task", law, "--n-prompts", 64).done().out
    words = " ".join(shown.split())
    assert words.index("how this file was read, or its task, is in doubt") < words.index("L0H0")


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Kind(2, 4, beside="alibi", norm="layer", mlp=True), score._slanted),
        (Kind(2, beside="sink", norm="layer", mlp=True, layout="in_turn"), score._with_a_logit),
    ],
)
def test_other_kinds_of_attention_are_the_strangers_own_function(tmp_path: Path, kind: Kind, way: Attend):  # fmt: skip
    model = Stranger(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(0))
    joins = {**STATED, "norm": "before", "layout": kind.layout, "positions": "none"}
    hints = {"n_heads": kind.heads, "score": "softmax", "attend_to_self": True, "model": joins}
    checkpoint = read(saved(tmp_path, model.state_dict()), task=TASK, **hints)
    assert "ALiBi and sinks" in checkpoint.assumed["model.attention_biases"]
    x, y, x_query, target = drawn(64, torch.Generator().manual_seed(3))
    column = target[:, None]
    prompts = Prompts(x, y[..., None], x_query, column, column, torch.zeros(64, D_X, 1))
    with torch.no_grad():
        theirs, plain = model(x, y, x_query), predictions(checkpoint.weights, prompts)[:, 0]
        ours = predictions(checkpoint.weights, prompts, attend=way)[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (plain - theirs).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bent_scores_in_a_trained_model_are_doubted(tmp_path: Path):
    kind = Kind(2, beside="softcap", norm="layer", mlp=True, steps=700, seed=11)
    checkpoint = load(saved(tmp_path, trained(kind).state_dict()), n_heads=2, task=TASK)
    assert "in doubt" in checkpoint.doubt


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled([2, 3], keep=lambda seed: seed == 2))
def test_a_sink_in_a_trained_model_is_doubted(tmp_path: Path, seed: int):
    kind = Kind(2, beside="sink", norm="layer", mlp=True, seed=seed)
    checkpoint = load(saved(tmp_path, trained(kind).state_dict()), n_heads=2, task=TASK)
    assert "softmax1" in checkpoint.doubt


@pytest.mark.slow
def test_positions_and_passes_are_assumed_where_nothing_shows_them(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    state["read_out.weight"].zero_()  # every reading predicts the same
    path = saved(tmp_path, state)
    checkpoint = read(path, n_heads=2, task=TASK)
    assert "rotary ones leave no trace in a file" in checkpoint.assumed["model.positions"]
    assert checkpoint.assumed["model.passes"] == 1
    assert checkpoint.assumed["task.d_x"] == D_X  # x and y may be in turn
    read_in = {"layout": "pairs", "positions": "rotary"}
    stated = read(path, n_heads=2, task=TASK, model=read_in)
    assert "model.positions" not in stated.assumed
    assert stated.assumed["model.rotary_base"].startswith("10000 (the loss hardly shows")
    assert "task.d_x" not in stated.assumed


def test_a_table_of_angles_tells_that_positions_are_rotary(tmp_path: Path):
    angles = {"rotary_emb.inv_freq": 100.0 ** -(torch.arange(0, 8, 2) / 8)}
    state = Stranger(Kind()).state_dict() | angles
    joins = {name: value for name, value in JOINS.items() if name != "positions"}
    model = read(saved(tmp_path, state), **{**PLAIN, "model": joins}).config.model
    assert (model.rotary_dim, model.rotary_base) == (8, pytest.approx(100.0))


def test_heads_of_odd_width_cannot_be_turned(tmp_path: Path):
    state = LAYOUTS["modules {x}_proj"](random_heads(d_head=3))
    assert_refused("even width, got 3", read, saved(tmp_path, state), n_heads=2, model={"positions": "rotary"})  # fmt: skip


# A file that was not understood.


def random_file(folder: Path) -> Path:
    state = Stranger(Kind(2)).state_dict()
    return saved(folder, {name: 3 * tensor for name, tensor in state.items()})


@pytest.mark.slow
def test_a_file_that_was_not_understood_is_refused_and_shown_anyway(tmp_path: Path):
    file = random_file(tmp_path)
    with pytest.raises(NotUnderstoodError) as error:
        load(file, n_heads=2, task=TASK)
    for word in (str(file), "this file was not understood", "--task", "--anyway", "anyway=True"):
        assert word in str(error.value)
    assert str(error.value).isprintable()
    checkpoint = load(file, n_heads=2, task=TASK, anyway=True)
    assert not checkpoint.understood
    assert ablate(checkpoint, n_prompts=16).to_frame().shape[0]


def test_a_stated_reading_that_predicts_nothing_is_refused(tmp_path: Path):
    path = random_file(tmp_path)
    hints = {**PLAIN, "model": {**JOINS, "context_only": False}}
    with pytest.raises(NotUnderstoodError, match="this file was not understood"):
        load(path, **hints)
    assert not read(path, **hints).understood


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "classify",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("ablate", "probe", "prune", "fit", "info")
        ),
    ],
)
def test_commands_lead_with_it(tmp_path: Path, command: str, run: Run):
    arguments = [command, random_file(tmp_path), "--n-heads", 2]
    run(*arguments).assert_refused("this file was not understood", "--task", "--anyway")
    ran = run(*arguments, "--json")
    assert (ran.code, "not understood" in ran.err) == (2, True)
    document = ran.document
    document = document[0] if command == "classify" else document
    assert document["understood"] is False
    assert "not understood" in document["error"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_anyway_shows_tables_below_the_same_words(tmp_path: Path, run: Run):
    arguments = ["ablate", random_file(tmp_path), "--n-heads", 2, "--anyway", "--n-prompts", 16]
    shown = run(*arguments).done().out
    assert shown.index("this file was not understood") < shown.index("L0H0")
    assert run(*arguments, "--json").done().document["understood"] is False


@pytest.mark.slow
def test_the_page_leads_with_it(tmp_path: Path, run: Run):
    arguments = ["report", random_file(tmp_path), "--n-heads", 2, "--out", tmp_path / "page"]
    run(*arguments).assert_refused("this file was not understood")
    assert not (tmp_path / "page").exists()


# Settings in the file.

WRITTEN = {
    "a config": {"config": {"n_heads": 2}},
    "Lightning": {"hyper_parameters": {"model": {"nhead": 2, "lr": 0.1}}, "epoch": 3},
    "nanoGPT": {"model_args": {"n_head": 2, "bias": False}},
    "arguments": {"args": argparse.Namespace(num_heads=2, out=Path("x"))},
    "a number": {"n_attn_heads": 2},
    "a text": {"cfg": {"num_attention_heads": "2"}},
    "camel case": {"config": {"numAttnHeads": 2}},
}


@pytest.mark.parametrize("beside", WRITTEN.values(), ids=WRITTEN)
def test_the_number_of_heads_is_found_in_the_file(tmp_path: Path, beside: dict):
    checkpoint = read(saved(tmp_path, {"state_dict": STATE, **beside}), **ALONE)
    assert checkpoint.config.model.n_heads == 2


def test_metadata_of_safetensors_and_numbers_in_an_npz_are_settings(tmp_path: Path):
    state = {name: tensor.contiguous() for name, tensor in STATE.items()}
    for metadata in (
        {"n_heads": "2"},
        {"config": '{"model": {"n_heads": 2}}', "note": "{not JSON"},
    ):
        save_file(state, tmp_path / "x.safetensors", metadata)
        assert read(tmp_path / "x.safetensors", **ALONE).config.model.n_heads == 2
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    np.savez(tmp_path / "x.npz", **arrays, n_heads=2, note="a text")
    assert read(tmp_path / "x.npz", **ALONE).config.model.n_heads == 2


def test_sizes_and_positions_of_the_task_are_found_too(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    config = {"n_heads": 2, "d_x": 2, "pos_encoding": "RoPE", "rope_theta": 500, "block_size": 9}
    hints = {"score": "softmax", "attend_to_self": True, "scale": 0.5}
    hints |= {"model": {"residual": True, "passes": 1}}
    checkpoint = read(saved(tmp_path, {"model": state, "config": config}), **hints)
    assert checkpoint.config.model.rotary_base == 500
    assert checkpoint.task.context_length == 8
    assert "task.d_x" not in checkpoint.assumed
    config["d_x"] = 7
    refused = assert_refused("d_x", read, saved(tmp_path, {"model": state, "config": config}))
    assert "7" in refused


def test_settings_that_contradict_or_are_impossible_are_refused(tmp_path: Path):
    assert settled({"n_head": 4, "num_heads": 4, "use_rope": True}) == {"n_heads": 4, "positions": "rotary"}  # fmt: skip
    for raw, words in (
        ({"n_heads": "two"}, "n_heads must be an integer"),
        ({"pos_encoding": "alibi"}, "alibi"),
    ):
        with pytest.raises(ValueError, match=words):
            settled(raw)
    two = saved(tmp_path, {"model": STATE, "config": {"n_head": 4, "num_heads": 2}})
    assert_refused("n_head = 4, num_heads = 2", read, two)
    assert read(two, n_heads=2, **ALONE).config.model.n_heads == 2
    (tmp_path / "config.json").write_text('{"n_heads": 4}')
    assert_refused("n_heads must be 2", read, saved(tmp_path, {"model": STATE, "n_heads": 2}))


# Several state dicts.


@pytest.mark.parametrize("names", [("ema", "raw"), ("model", "model_ema"), ("seed0", "seed1"), ("best", "last")])  # fmt: skip
def test_several_state_dicts_are_named_and_one_is_read_when_named(tmp_path: Path, names: tuple):
    first, second = names
    other = {name: 2 * tensor for name, tensor in STATE.items()}
    file = saved(tmp_path, {first: STATE, second: other, "optimizer": {"state": STATE}})
    refused = assert_refused("2 state dicts", read, file, n_heads=2)
    assert f"{first}, {second}" in refused
    assert f"--weights {first}" in refused
    hints = {"n_heads": 2, **ALONE}
    one, two = (read(file, weights=name, **hints).weights.W_V for name in names)
    torch.testing.assert_close(2 * one, two)
    assert_refused("weights must name", read, file, weights="none", n_heads=2)


def test_layers_heads_and_log_entries_are_no_copies():
    layer = {f"{x}_proj.weight": (4, 4) for x in "qkvo"}
    for names in (("layer_0", "layer_1"), ("h.0", "h.1"), ("blocks_0", "blocks_1")):
        assert not copies_in({f"{n}.attn.{x}": s for n in names for x, s in layer.items()})
    assert not copies_in({f"{x}.heads.{h}.weight": (4, 4) for x in "qkv" for h in range(3)})
    averaged = {f"model.{x}": s for x, s in layer.items()} | {f"ema.module.{x}": s for x, s in layer.items()}  # fmt: skip
    assert copies_in({f"state_dict.{x}": s for x, s in averaged.items()}) == ["state_dict.model", "state_dict.ema"]  # fmt: skip


def test_a_part_of_the_model_beside_its_state_dict_is_read(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    inner = {name: t for name, t in state.items() if not name.startswith("read_out")}
    outer = {name.partition(".")[2]: t for name, t in state.items() if name.startswith("read_out")}
    apart = read(saved(tmp_path, {"model": inner, "read_out": outer}), **PLAIN)
    whole = read(saved(tmp_path, state), **PLAIN)
    assert torch.equal(apart.weights.tensors["unembed.W_U"], whole.weights.tensors["unembed.W_U"])


# Other kinds of models, names and endings.


def block(**more: tuple[int, ...]) -> dict[str, Tensor]:
    shapes = {f"layers.0.attn.{x}_proj.weight": (8, 8) for x in "qkvo"} | more
    return {name: torch.randn(shape) for name, shape in shapes.items()}


LLAMA = {
    "layers.0.mlp.gate_proj.weight": (16, 8),
    "layers.0.mlp.up_proj.weight": (16, 8),
    "layers.0.mlp.down_proj.weight": (8, 16),
    "layers.0.input_layernorm.weight": (8,),
}
KINDS = {
    "gated": (LLAMA, "gated MLP"),
    "grouped": ({f"layers.0.attn.{x}_proj.weight": (4, 8) for x in "kv"}, "grouped keys"),
    "w3": ({"layers.0.feed_forward.w3.weight": (16, 8)}, "gated MLP"),
    "query norms": ({"layers.0.attn.q_norm.weight": (4,)}, "norms of queries"),
}


@pytest.mark.parametrize(("more", "words"), KINDS.values(), ids=KINDS)
def test_a_block_of_another_kind_is_named_at_the_first_try(tmp_path: Path, more: dict, words: str):
    refused = assert_refused(words, read, saved(tmp_path, block(**more)))
    assert "hook the module in memory" in refused
    assert "--map" not in refused


def test_outputs_that_are_classes_are_named_at_the_first_try(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    state["read_out.weight"], state["read_out.bias"] = torch.randn(57, 16), torch.zeros(57)
    assert_refused("classes or words: 57 outputs", read, saved(tmp_path, state), n_heads=2)


def test_offers_of_map_stand_only_where_they_help(tmp_path: Path):
    for spoilt, words in ((torch.nan, "finite"), (1j, "floating-point")):
        state = {name: tensor * spoilt for name, tensor in STATE.items()}
        assert "--map" not in assert_refused(words, read, saved(tmp_path, state), n_heads=2)
    words = block() | {"embedding.weight": torch.randn(50, 8), "head.weight": torch.randn(50, 8)}
    assert "--map" not in assert_refused("word tokens", read, saved(tmp_path, words))
    for root, got in (([1.0, 2.0], "a list"), (torch.ones(3), "one tensor"), ({"lr": 1}, "of lr")):
        assert_refused(got, read, saved(tmp_path, root))


READ_OUTS = ("unembed", "head", "lm_head", "output_proj", "final_proj", "readout")


ENDS = product(("embed", "wte", "embedding", "input_proj"), READ_OUTS)
SAMPLE = (("embed", "unembed"), ("wte", "lm_head"), ("embedding", "head"), ("input_proj", "readout"))  # fmt: skip


@pytest.mark.parametrize(("read_in", "name"), sampled(ENDS, keep=lambda case: case in SAMPLE))
def test_known_names_of_the_ends(tmp_path: Path, read_in: str, name: str):
    state = Stranger(Kind()).state_dict()
    named = {n.replace("read_out", name).replace("read_in", read_in): t for n, t in state.items()}
    if read_in != "input_proj":
        del named[f"{read_in}.bias"]  # so that the shape must tell it from a table of words
    checkpoint = read(saved(tmp_path, named), **PLAIN)
    assert torch.equal(checkpoint.weights.tensors["W_in"], state["read_in.weight"].T)
    assert torch.equal(checkpoint.weights.tensors["unembed.W_U"], state["read_out.weight"].T)


@pytest.mark.parametrize("row", ["b.mine=o_proj", "mine=o_proj", "a.b.mine.weight=o_proj", "b.mine.weight=o_proj.weight"])  # fmt: skip
def test_any_whole_words_of_a_name_can_be_mapped(tmp_path: Path, row: str):
    state = {f"a.b.{n.rpartition('attn.')[2]}": t for n, t in STATE.items()}
    mine = {n.replace("out_proj", "mine"): t for n, t in state.items()}
    hints = {"n_heads": 2, **ALONE}
    expected = read(saved(tmp_path, state), **hints).weights.W_O
    assert torch.equal(read(saved(tmp_path, mine), map=[row], **hints).weights.W_O, expected)
    assert "a.b.mine" in assert_refused("whole words", read, saved(tmp_path, mine), map=["no=o_proj"])  # fmt: skip


def test_other_kinds_of_files_get_a_line_that_says_what_to_do(tmp_path: Path):
    for ending, words in ((".eqx", "numpy.savez"), (".onnx", "torch.save"), (".h5", "numpy.savez")):
        (tmp_path / f"x{ending}").write_bytes(b"\0")
        assert_refused(words, read, tmp_path / f"x{ending}")
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "_METADATA").write_text("{}")
    assert "numpy.savez" in assert_refused("an orbax checkpoint", read, tmp_path / "orbax")


# Layers on a first axis.


def of_flax(state: dict[str, Tensor], n_layers: int, *, heads: bool) -> dict[str, np.ndarray]:
    """The layers' tensors side by side on a first axis, with flax's names and axes."""
    tree: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        if not name.startswith("blocks."):
            tree[name.replace("weight", "kernel")] = tensor.mT.numpy() if tensor.ndim == 2 else tensor.numpy()  # fmt: skip
        elif name.startswith("blocks.0."):
            rest = name.removeprefix("blocks.0.")
            stack = torch.stack([state[f"blocks.{n}.{rest}"] for n in range(n_layers)])
            stack = stack.mT if stack.ndim == 3 else stack
            if heads and "_proj" in rest:
                stack = stack.unflatten(1 if "o_proj" in rest else 2, (2, -1))
            kind = "scale" if "norm" in rest else "kernel"
            rest = rest.replace("mlp.0", "mlp.Dense_0").replace("mlp.2", "mlp.Dense_1")
            tree["ScanBlock_0." + rest.replace("weight", kind)] = stack.numpy()
    return {name.replace("final_norm.kernel", "final_norm.scale"): t for name, t in tree.items()}


@pytest.mark.parametrize("heads", [True, False])
def test_layers_stacked_on_a_first_axis_are_read(tmp_path: Path, heads: bool):
    model = Stranger(Kind(3, norm="layer", mlp=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(0))
    joins = {**STATED, "norm": "before", "positions": "none"}
    hints = {"n_heads": 2, "score": "softmax", "attend_to_self": True, "model": joins, "task": TASK}
    tree = of_flax(model.state_dict(), 3, heads=heads)
    np.savez(tmp_path / "x.npz", **{name.replace(".", "/"): t for name, t in tree.items()})
    ours, theirs = prediction(read(tmp_path / "x.npz", **hints), model)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    copies = {f"params/{name}": np.stack([t, t]) for name, t in of_flax(Stranger(Kind()).state_dict(), 1, heads=True).items()}  # fmt: skip
    copies = {name.replace("ScanBlock_0", "block"): t[:, 0] if "Scan" in name else t for name, t in copies.items()}  # fmt: skip
    np.savez(tmp_path / "two.npz", **copies)
    assert_refused("must hold one model, got 2", read, tmp_path / "two.npz", **hints)
