"""Files that a stranger's code wrote: no number without a word where something was guessed."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.foreign.readings import doubts
from mechinterp.checkpoints.foreign.settings import settings_of, settled
from mechinterp.checkpoints.io.copies import copies_in
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.load import load
from mechinterp.models.run.attend import Attend
from mechinterp.models.run.general import predictions
from tests.checkpoints.files import assert_refused, loaded, read, saved
from tests.checkpoints.foreign_files import LAYOUTS, random_heads, softmax_paper_state
from tests.checkpoints.strangers import (
    D_X,
    TASK,
    Kind,
    Stranger,
    joins,
    prediction,
    random_weights,
    scanned,
    some_prompts,
    trained,
)
from tests.conftest import Run, sampled
from tests.models.test_layered_models import garg

HEADS = random_heads()
STATE = LAYOUTS["modules {x}_proj"](HEADS)
"""Two heads in names that do not say how many."""
PLAIN = {"n_heads": 2, "task": TASK, "score": "softmax", "attend_to_self": True, "scale": 8**-0.5, "model": joins(Kind())}  # fmt: skip
"""A reading that leaves nothing open."""
ALONE = {"score": "softmax", "scale": 0.5, "columns": "x,y", "attend_to_self": False, "sign": "plus", "model": {"positions": "none"}}  # fmt: skip
"""The same for one layer of attention alone."""


STORED = Path(__file__).with_name("trained")
"""Files NUMBER.safetensors of the models of TRAINED, in its order."""
WHOLE = {"norm": "layer", "mlp": True}
TRAINED = (
    Kind(2, norm="rms", mlp=True, steps=300),
    Kind(**WHOLE, passes=2, positions="adjacent"),
    Kind(2, **WHOLE, layout="in_turn", positions="learned", steps=1500),
    Kind(2, norm="rms", mlp=True, positions="adjacent", base=100.0, steps=900, seed=5),
    Kind(2, norm="bare", mlp=True),
    Kind(2, **WHOLE, positions="sines", activation="relu"),
    Kind(2, norm="layer", positions="halves", base=30.0, steps=900, seed=3),
    Kind(2, norm="layer", positions="halves", base=100.0, steps=1500),
    Kind(2, **WHOLE, activation="silu", steps=1500),
    Kind(2, **WHOLE, scale="width", activation="relu", steps=1500),
    Kind(**WHOLE, passes=3),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(TRAINED, keep=TRAINED[0].__eq__))
def test_the_loss_tells_what_leaves_no_trace(tmp_path: Path, kind: Kind):
    """Rotary positions, x and y in turn, norms without means.

    Readings that predict equally well are named with the option that decides.
    """
    assert_read(tmp_path, kind, trained(kind))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TRAINED)))
def test_stored_models_of_every_kind_are_read(tmp_path: Path, number: int):
    """The weights that `trained` gave, so that every run of the tests reads every kind."""
    model = Stranger(TRAINED[number])
    model.load_state_dict(load_file(STORED / f"{number:02d}.safetensors"))
    assert_read(tmp_path, TRAINED[number], model.eval().requires_grad_(False))


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 8])
def test_a_wrong_scale_of_several_layers_is_named_with_the_value_to_type(
    tmp_path: Path, number: int
):
    """Code with scores q.k * 2 / sqrt(d_head) keeps the queries of both layers half as large."""
    model = Stranger(TRAINED[number])
    model.load_state_dict(load_file(STORED / f"{number:02d}.safetensors"))
    state = {n: t / 2 if "q_proj" in n else t for n, t in model.state_dict().items()}
    hints = {"n_heads": 2, "task": TASK, "score": "softmax", "model": joins(TRAINED[number])}
    doubt = loaded(tmp_path, state, **hints).doubt
    named = re.search(r"with --scale (\S+) instead", doubt)
    assert named is not None
    right = 2 * 8**-0.5
    assert float(named[1]) == pytest.approx(right, rel=0.1)
    assert "--task" not in doubt
    assert loaded(tmp_path, state, **hints, scale=right).doubt == ""


def test_the_task_is_in_no_doubt_and_not_asked_for_once_every_field_is_given(tmp_path: Path):
    """Random heads predict nothing, whatever the task."""
    state = softmax_paper_state(HEADS)
    law = {"context_length": 20, "noise_var": 0.1, "beta_var": 1, "query_noise": False}
    half, whole = law, law | {"covariance": {"kind": "identity"}}
    assert "--task" in loaded(tmp_path, state, task=half).doubt
    doubt = loaded(tmp_path, state, task=whole).doubt
    assert doubt
    assert "--task" not in doubt
    assert "the task of this file" not in doubt


def assert_read(tmp_path: Path, kind: Kind, model: Stranger) -> None:
    """The file of a trained model is read so that it predicts as the model does, without a doubt."""
    said = joins(kind)
    if kind == TRAINED[0]:  # sooner done where these four are stated
        names = ("layout", "residual", "context_keys", "activation")
        stated = {name: said[name] for name in names}
    else:
        # Running layers again goes on with any descent, so that the loss does not decide it.
        stated = {"passes": kind.passes} if kind.passes > 1 else None
    file = saved(tmp_path, model.state_dict())
    checkpoint = load(file, n_heads=2, task=TASK, model=stated)
    ours, theirs = prediction(checkpoint, model)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    ties = any(each.ties for each in checkpoint.readings[1:])
    assert ("state --" in str(checkpoint.assumed.get("undetermined"))) is ties
    assert checkpoint.doubt == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word"),
    sampled(
        [
            (Kind(2, beside="sink", norm="layer", mlp=True, seed=2), "softmax1"),
            (Kind(2, beside="softcap", norm="layer", mlp=True, steps=700, seed=11), "in doubt"),
            (Kind(2, norm="layer", mlp=True, parallel=True), "in doubt"),
        ],
        keep=lambda case: case[1] == "softmax1",
    ),
)
def test_a_reading_that_training_would_have_bettered_is_doubted(
    tmp_path: Path, kind: Kind, word: str
):
    """A sink, bent scores, or attention and MLP side by side, which no reading has."""
    file = saved(tmp_path, trained(kind).state_dict())
    stated = joins(kind) if kind.beside == "sink" else None
    assert word in load(file, n_heads=2, task=TASK, model=stated).doubt


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Kind(2, 4, beside="alibi", norm="layer", mlp=True), doubts._slanted),
        (Kind(2, beside="sink", norm="layer", mlp=True, layout="in_turn"), doubts._with_a_logit),
    ],
)
def test_other_kinds_of_attention_are_the_strangers_own_function(tmp_path: Path, kind: Kind, way: Attend):  # fmt: skip
    model = random_weights(kind)
    hints = {"n_heads": kind.heads, "score": "softmax", "attend_to_self": True}
    hints |= {"model": joins(kind), "scale": (kind.width // kind.heads) ** -0.5}
    checkpoint = loaded(tmp_path, model.state_dict(), task=TASK, **hints)
    assert "ALiBi and sinks" in checkpoint.assumed["model.attention_biases"]
    prompts = some_prompts()
    plain, theirs = prediction(checkpoint, model)
    ours = predictions(checkpoint.weights, prompts, attend=way)[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (plain - theirs).abs().max() > 1e-3


@pytest.mark.slow
def test_positions_and_passes_are_assumed_where_nothing_shows_them(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    state["read_out.weight"].zero_()  # every reading predicts the same
    checkpoint = loaded(tmp_path, state, n_heads=2, task=TASK)
    assert "rotary ones leave no trace in a file" in checkpoint.assumed["model.positions"]
    assert checkpoint.assumed["model.passes"] == 1
    assert checkpoint.assumed["task.d_x"] == D_X  # x and y may be in turn
    read_in = {"layout": "pairs", "positions": "rotary"}
    stated = read(tmp_path / "x.pt", n_heads=2, task=TASK, model=read_in)
    assert not {"model.positions", "task.d_x"} & stated.assumed.keys()
    assert stated.assumed["model.rotary_base"].startswith("10000 (the loss hardly shows")


@pytest.mark.slow
def test_positions_of_layers_are_tried_or_taken_from_a_table(tmp_path: Path):
    kind = Kind(norm="layer", mlp=True)
    state = random_weights(kind).state_dict()
    said = {name: value for name, value in joins(kind).items() if name != "positions"}
    hints = {**PLAIN, "model": said}
    readings = loaded(tmp_path, state, **hints).readings
    assert {"none", "sinusoidal"} <= {each.tried["positions"] for each in readings}
    angles = {"rotary_emb.inv_freq": 100.0 ** -(torch.arange(0, 8, 2) / 8)}
    model = loaded(tmp_path, state | angles, **hints).config.model
    assert (model.rotary_dim, model.rotary_base) == (8, pytest.approx(100.0))
    odd = LAYOUTS["modules {x}_proj"](random_heads(d_head=3))
    assert_refused("even width, got 3", loaded, tmp_path, odd, n_heads=2, model={"positions": "rotary"})  # fmt: skip


# A bad loss.

OPTIONS = "--n-heads 2 --score softmax --scale 0.5 --columns x,y --no-attend-to-self --sign plus"
OPTIONS = (*OPTIONS.split(), "--model", "positions=none")


@pytest.mark.parametrize("kind", ["random", "zero"])
def test_a_bad_loss_puts_the_task_in_doubt_and_refuses_nothing(tmp_path: Path, kind: str):
    """Every tensor has its place, so the heads are shown."""
    state = STATE if kind == "random" else {name: 0 * tensor for name, tensor in STATE.items()}
    checkpoint = load(saved(tmp_path, state), n_heads=2, **ALONE)
    for word in ("in doubt", "--task", "--predictions"):
        assert word in checkpoint.doubt
    assert ablate(checkpoint, n_prompts=16).to_frame().shape[0]
    known = load(saved(tmp_path, softmax_paper_state(random_heads())))
    assert "in doubt" in known.doubt
    assert classify(known, n_prompts=256).label == "undetermined"


def test_the_loss_and_the_doubt_of_a_known_layout_are_computed_where_they_are_shown(tmp_path: Path):
    file = saved(tmp_path, softmax_paper_state(random_heads(n_heads=3, d_x=5)))
    load(file)
    before = time.process_time()
    checkpoint = load(file)
    assert time.process_time() - before < 0.2
    assert "doubt" not in checkpoint.assumed.keys() | vars(checkpoint).keys()
    assert "every" not in vars(checkpoint.readings)


@pytest.mark.slow
def test_commands_lead_with_the_doubt(tmp_path: Path, run: Run):
    file = saved(tmp_path, STATE)
    ablation = ("ablate", file, *OPTIONS, "--n-prompts", 16)
    shown = run(*ablation).done().out
    assert shown.index("in doubt") < shown.index("L0H0")
    assert "in doubt" in run(*ablation, "--json").done().document["assumed"]["doubt"]
    document = run("classify", file, *OPTIONS, "--json").done().document[0]
    assert document["pattern"] == "undetermined"


# Settings in the file, or beside it.


def test_sizes_and_positions_of_the_task_are_found_too(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    config = {"n_heads": 2, "d_x": 2, "pos_encoding": "RoPE", "rope_theta": 500, "block_size": 9}
    hints = {"score": "softmax", "attend_to_self": True, "scale": 0.5}
    hints |= {"model": {"residual": True, "passes": 1}}
    checkpoint = loaded(tmp_path, {"model": state, "config": config}, **hints)
    assert checkpoint.config.model.rotary_base == 500
    assert checkpoint.task.context_length == 8
    assert "task.d_x" not in checkpoint.assumed
    config["d_x"] = 7
    assert "7" in assert_refused("d_x", loaded, tmp_path, {"model": state, "config": config})


def test_settings_that_contradict_or_are_impossible_are_refused(tmp_path: Path):
    assert settled({"n_head": 4, "num_heads": 4, "use_rope": True}) == {"n_heads": 4, "positions": "rotary"}  # fmt: skip
    two = saved(tmp_path, {"model": STATE, "config": {"n_head": 4, "num_heads": 2}})
    assert_refused("n_head = 4, num_heads = 2", read, two)
    assert read(two, n_heads=2, **ALONE).config.model.n_heads == 2
    (tmp_path / "config.json").write_text('{"n_heads": 4}')
    assert_refused("n_heads must be 2", loaded, tmp_path, {"model": STATE, "n_heads": 2})


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        *(
            ({"n_head": each}, "n_head must be an integer >= 1, got")
            for each in ("four", 4.0, True, 0)
        ),
        *(
            ({"noise_std": each}, "noise_std must be a number >= 0, got")
            for each in ("-1", "nan", True)
        ),
        ({"n_points": 1}, "n_points must be an integer >= 2, got 1"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon must be a number >= 0, got 'small'"),
        ({"attend_to_self": "yes"}, "attend_to_self must be true or false, got 'yes'"),
        ({"pos_encoding": "alibi"}, "alibi"),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be False, got True"),
    ],
)
def test_impossible_settings_are_refused(stated: dict, words: str):
    with pytest.raises(ValueError, match=words):
        settled(stated)


@pytest.mark.parametrize("layout", ["config.json", "config.yaml", "folder"])
def test_noise_and_points_in_any_spelling(tmp_path: Path, layout: str):
    document: dict[str, object] = {"n_head": 4, "noise_std": "1", "n_points": 9}
    if layout == "config.yaml":
        training = {"curriculum": {"points": {"end": "9"}}, "task_kwargs": {"noise_std": 1}}
        document = {"model": {"n_head": "4"}, "training": training}
    (tmp_path / (layout if layout != "folder" else "config.json")).write_text(json.dumps(document))
    file = tmp_path / "model.safetensors"
    save_file(garg().state_dict(), file)
    checkpoint = read(tmp_path if layout == "folder" else file, model={"passes": 1})
    assert (checkpoint.task.noise_var, checkpoint.task.context_length) == (1.0, 8)
    assert checkpoint.assumed["task.beta_var"] == checkpoint.task.beta_var == 1.0
    assert not {"task.noise_var", "task.context_length"} & checkpoint.assumed.keys()
    assert read(file, task={"noise_var": 2.0}, model={"passes": 1}).task.noise_var == 2


@pytest.mark.parametrize("file", ["config.json", "config.yaml"])
@pytest.mark.parametrize("place", ["top", "model"])
def test_settings_beside_a_file_count_at_the_top_and_under_model(
    tmp_path: Path, file: str, place: str
):
    settings = {"num_heads": 4, "score": "softmax", "lr": 0.1, "scale_attn_weights": True}
    document = settings | {"bias": None} if place == "top" else {"model": settings, "seed": 3}
    text = json.dumps(document)
    (tmp_path / file).write_text(text)
    stated = settings_of(tmp_path / "x.pt", {})
    assert (stated["n_heads"], stated["score"]) == (4, "softmax")
    assert_refused(
        rf"{file}: n_heads must be 2.* got 4", settings_of, tmp_path / "x.pt", {"n_heads": 2}
    )
    (tmp_path / file).write_text(json.dumps({"n_heads": 3, "model": {"n_head": 4}}))
    assert_refused(rf"{file}: n_heads must be 3.* got 4", settings_of, tmp_path / "x.pt", {})


def test_config_json_and_config_yaml_that_differ_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"n_heads": 2}')
    (tmp_path / "config.yaml").write_text("n_heads: 2\nscore:\nlr: 1e-3\n")
    assert settings_of(tmp_path / "x.pt", {})["n_heads"] == 2
    (tmp_path / "config.yaml").write_text("model:\n  n_heads: 3\n")
    words = r"config\.yaml: n_heads must be 2, as in config\.json, got 3"
    assert_refused(words, settings_of, tmp_path / "x.pt", {})


def test_points_beyond_the_positions_are_not_taken(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"n_head": 4, "n_points": 5000}')
    checkpoint = loaded(tmp_path, garg().state_dict())
    assert checkpoint.assumed["task.context_length"] == checkpoint.task.context_length == 6


@pytest.mark.parametrize(
    "text",
    ["model: [", "model: &a [*a", "x: !!python/object/apply:os.system ['false']\n- 1", "a" * 2**17],
)
def test_a_broken_config_beside_the_weights_ends_in_one_line(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    assert_refused(r"config\.yaml: ", loaded, tmp_path, STATE)


# Several state dicts, and what lies beside one.


@pytest.mark.parametrize("names", [("model", "model_ema"), ("seed0", "seed1")])
def test_several_state_dicts_are_named_and_one_is_read_when_named(tmp_path: Path, names: tuple):
    other = {name: 2 * tensor for name, tensor in STATE.items()}
    state = {names[0]: STATE, names[1]: other, "optimizer": {"state": STATE}}
    refused = assert_refused("2 state dicts", loaded, tmp_path, state, n_heads=2)
    assert ", ".join(names) in refused
    assert f"--weights {names[0]}" in refused
    hints, file = {"n_heads": 2, **ALONE}, tmp_path / "x.pt"
    one, two = (read(file, weights=name, **hints).weights.W_V for name in names)
    torch.testing.assert_close(2 * one, two)
    assert_refused("weights must name", read, file, weights="none", n_heads=2)


def test_layers_heads_and_log_entries_are_no_copies():
    layer = {f"{x}_proj.weight": (4, 4) for x in "qkvo"}
    for names in (("layer_0", "layer_1"), ("h.0", "h.1"), ("blocks_0", "blocks_1")):
        assert not copies_in({f"{n}.attn.{x}": s for n in names for x, s in layer.items()})
    assert not copies_in({f"{x}.heads.{h}.weight": (4, 4) for x in "qkv" for h in range(3)})
    names = ("state_dict.model", "state_dict.ema")
    averaged = {f"{names[0]}.{x}": s for x, s in layer.items()}
    averaged |= {f"{names[1]}.module.{x}": s for x, s in layer.items()}
    assert copies_in(averaged) == list(names)


def test_a_part_of_the_model_beside_its_state_dict_is_read(tmp_path: Path):
    state = Stranger(Kind()).state_dict()
    inner = {name: t for name, t in state.items() if not name.startswith("read_out")}
    outer = {name.partition(".")[2]: t for name, t in state.items() if name.startswith("read_out")}
    apart = loaded(tmp_path, {"model": inner, "read_out": outer}, **PLAIN)
    assert torch.equal(apart.weights.tensors["unembed.W_U"], state["read_out.weight"].T)


def test_harmless_buffers_are_ignored_and_named(tmp_path: Path):
    buffers = {"attn.mask": torch.ones(9, 9).tril(), "attn.bias": torch.ones(1, 1, 9, 9)}
    buffers |= {"loss_fn.pos_weight": torch.ones(1), "attn.tril": torch.ones(9, 9)}
    checkpoint = loaded(tmp_path, STATE | buffers, n_heads=2, **ALONE)
    assert checkpoint.assumed["unused"] == list(buffers)


NAMES_OF_OTHERS = ("scaler.weight", "ema_gate.weight", "rng_features.weight", "optimizer_net.weight", "mask.weight")  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES_OF_OTHERS, "step", "attn.mask", "loss_fn.weight", "sched.weight"])  # fmt: skip
def test_no_tensor_falls_out_of_a_state_dict_without_a_word(tmp_path: Path, name: str):
    further = {name: 0.8 * torch.randn(6, 6)}
    refused = assert_refused(name, loaded, tmp_path, STATE | further, n_heads=2, **ALONE)
    assert f"--map {name}=unused" in refused
    checkpoint = load(tmp_path / "x.pt", n_heads=2, map={name: "unused"}, **ALONE)
    assert checkpoint.assumed["unused"] == [name]
    torch.testing.assert_close(checkpoint.weights.OV, HEADS.OV)


def test_the_state_of_an_optimiser_and_averages_are_told_from_weights(tmp_path: Path):
    moments = {"state": {0: {"exp_avg": torch.ones(3, 3)}}}
    run = {"encoder": {"attn": {n.removeprefix("attn."): t for n, t in STATE.items()}}}
    checkpoint = loaded(tmp_path, run | {"optimizer_state_dict": moments}, n_heads=2, **ALONE)
    torch.testing.assert_close(checkpoint.weights.OV, HEADS.OV)
    for prefix, scalars in (("ema.", {}), ("ema_model.", {"initted": torch.tensor(True)}), ("module.", {"n_averaged": torch.tensor(3)})):  # fmt: skip
        averaged = {prefix + name: tensor for name, tensor in STATE.items()} | scalars
        checkpoint = loaded(tmp_path, averaged, n_heads=2, **ALONE)
        torch.testing.assert_close(checkpoint.weights.OV, HEADS.OV)
        assert checkpoint.assumed.get("unused", []) == list(scalars)
    nested = loaded(tmp_path, {"ema": STATE, "step": 3}, n_heads=2, **ALONE)
    torch.testing.assert_close(nested.weights.OV, HEADS.OV)


# Names.


@pytest.mark.parametrize(
    ("read_in", "name"),
    [("embed", "unembed"), ("wte", "lm_head"), ("embedding", "head"), ("input_proj", "readout")],
)
def test_known_names_of_the_ends(tmp_path: Path, read_in: str, name: str):
    state = Stranger(Kind()).state_dict()
    named = {n.replace("read_out", name).replace("read_in", read_in): t for n, t in state.items()}
    if read_in != "embedding":  # the shape, or the bias, must tell it from a table of words
        del named[f"{read_in}.bias"]
    checkpoint = loaded(tmp_path, named, **PLAIN)
    assert torch.equal(checkpoint.weights.tensors["W_in"], state["read_in.weight"].T)
    assert torch.equal(checkpoint.weights.tensors["unembed.W_U"], state["read_out.weight"].T)


@pytest.mark.parametrize("row", ["b.mine=o_proj", "mine=o_proj", "a.b.mine.weight=o_proj", "b.mine.weight=o_proj.weight"])  # fmt: skip
def test_any_whole_words_of_a_name_can_be_mapped(tmp_path: Path, row: str):
    state = {f"a.b.{n.rpartition('attn.')[2]}".replace("out_proj", "mine"): t for n, t in STATE.items()}  # fmt: skip
    checkpoint = loaded(tmp_path, state, map=dict([row.split("=")]), n_heads=2, **ALONE)
    torch.testing.assert_close(checkpoint.weights.OV, HEADS.OV)
    file = tmp_path / "x.pt"
    assert "a.b.mine" in assert_refused("whole words", read, file, map={"no": "o_proj"})
    assert_refused("map must give different names", read, file, map={"q_proj": "k_proj"})


def test_the_names_that_a_refusal_offers_are_those_that_are_read(tmp_path: Path):
    known = {f"{x}_proj": torch.randn(16, 16) for x in "qkvo"}
    known |= {"read_in": torch.randn(16, 3), "read_out": torch.randn(1, 16)}
    theirs = {name: f"mine{number}" for number, name in enumerate(known)}
    state = {f"{theirs[n]}.weight": tensor for n, tensor in known.items()}
    refused = assert_refused("--map THEIRS=KNOWN", loaded, tmp_path, state, **PLAIN)
    listed = refused.partition("KNOWN is one of ")[2].removesuffix(".").split(", ")
    assert set(known) <= set(listed)
    rows = {mine: name for name, mine in theirs.items()}
    mapped = read(tmp_path / "x.pt", map=rows, **PLAIN).weights.tensors
    own = loaded(tmp_path, {f"{n}.weight": t for n, t in known.items()}, **PLAIN).weights.tensors
    assert all(torch.equal(mapped[name], tensor) for name, tensor in own.items())


# Other kinds of models and files.


def lfs(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def orbax(folder: Path) -> None:
    folder.mkdir()
    (folder / "_METADATA").write_text("{}")


OTHERS = {
    "git lfs pull": ("x.pt", lfs),
    "needs torch.nn.modules.linear.Linear.*state_dict": ("x.pt", lambda f: torch.save(nn.Linear(2, 2), f)),
    "TorchScript": ("x.pt", lambda f: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), f)),
    "a list": ("x.pt", lambda f: torch.save([1.0, 2.0], f)),
    "one tensor": ("x.pt", lambda f: torch.save(torch.ones(3), f)),
    "of lr": ("x.pt", lambda f: torch.save({"lr": 1}, f)),
    "numpy.savez": ("x.eqx", lambda f: f.write_bytes(b"\0")),
    "torch.save": ("x.onnx", lambda f: f.write_bytes(b"\0")),
    "an orbax checkpoint.*numpy.savez": ("orbax", orbax),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("words", OTHERS)
def test_other_kinds_of_files_get_a_line_that_says_what_to_do(tmp_path: Path, words: str):
    name, write = OTHERS[words]
    write(tmp_path / name)
    assert_refused(words, read, tmp_path / name)


def test_one_model_and_one_file_of_weights_are_read(tmp_path: Path):
    tree = scanned(Stranger(Kind()).state_dict(), 1, heads=True)
    tree = {name.replace("ScanBlock_0", "block"): t[0] if "Scan" in name else t for name, t in tree.items()}  # fmt: skip
    copies = {f"params/{name}": np.stack([t, t]) for name, t in tree.items()}
    np.savez(tmp_path / "two.npz", **copies)
    assert_refused("must hold one model, got 2", read, tmp_path / "two.npz", **PLAIN)
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(STATE, folder / "a.pt")
    assert read(folder, n_heads=2, **ALONE).path == folder
    torch.save(STATE, folder / "b.ckpt")
    with pytest.raises(CheckpointError, match=r"one of a\.pt, b\.c"):
        read(folder, n_heads=2)
