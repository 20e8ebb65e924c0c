"""Files written from known weights, in drawn combinations of layout, container and options, are read as those weights."""

import argparse
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.settings import COUNTS
from mechinterp.checkpoints.foreign.tensors.names import PROJECTIONS, ROWS, piece_of
from mechinterp.checkpoints.io.trees import WRAPPERS
from mechinterp.checkpoints.load import convert
from mechinterp.config import SCORES
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights
from tests.checkpoints.files import assert_refused, hugging_face, read
from tests.checkpoints.foreign_files import FORMATS, LAYOUTS, NARROW, State, biased, random_heads
from tests.checkpoints.strangers import (
    SPELLINGS,
    TASK,
    Kind,
    joins,
    prediction,
    random_weights,
    scanned,
    spelled,
)
from tests.conftest import assert_same

SETTINGS = {
    "derandomize": True,
    "deadline": None,
    "phases": [Phase.explicit, Phase.generate],
}


class Trainer:
    """Pickled by its name and its attributes."""

    def __init__(self) -> None:
        self.step = 3


BESIDE = {
    "loss": np.float64(0.5),
    "losses": np.ones(3),
    "kind": np.dtype("f4"),
    "args": argparse.Namespace(lr=0.1, out=Path("a")),
    "device": torch.device("cpu"),
    "epoch": 3,
    "name": None,
}
LOGGED = {
    "trainer": Trainer(),
    "dtype": torch.float32,
    "size": torch.Size((2, 3)),
    "seen": {1, 2},
    "fixed": frozenset((1,)),
    "both": slice(1, 2),
    "by pair": {(1, 2): 3.0, 0.5: None, None: 10**30, 3: b"x", True: -1},
    "log": [{"omega": torch.ones(3)}, (1, (2, (3, (4,))))],
    "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(3)}}, "groups": [{"lr": 0.1}]},
}
"""Things that code saves beside weights; more of them beside a dictionary of weights."""
STATED: dict[str, Callable[[dict[str, int]], dict[str, object]]] = {
    "a config": lambda stated: {"config": stated},
    "Lightning": lambda stated: {"hyper_parameters": {"model": stated | {"lr": 0.1}}, "epoch": 3},
    "arguments": lambda stated: {"args": argparse.Namespace(**stated, out=Path("x"))},
    "a number": lambda stated: stated,
    "a text": lambda stated: {"cfg": {name: str(value) for name, value in stated.items()}},
    "camel case": lambda stated: {"config": {re.sub("_([a-z])", lambda c: c[1].upper(), n): v for n, v in stated.items()}},
}  # fmt: skip
"""Where runs keep their settings."""
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pkl")
CONTAINERS = (*TORCH, ".npz", ".safetensors", "arrays", ".msgpack", "folder", "shards")


def flax_array(array: np.ndarray) -> msgpack.ExtType:
    packed = msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
    return msgpack.ExtType(1, packed)


@contextmanager
def written(
    state: State, container: str, stated: dict[str, object], **how: object
) -> Iterator[Path]:
    """A file, or a folder, with a state dict and settings, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        yield write(Path(folder), state, container, stated, **how)


def write(
    folder: Path,
    state: State,
    container: str,
    stated: dict[str, object],
    *,
    wrapper: str = "model",
    protocol: int = 2,
    beside: str = "a config",
) -> Path:
    """A new file, or folder, in a folder, with a state dict and settings."""
    file = folder / f"x{container}"
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    if container in ("folder", "shards"):
        shards = 1 if container == "folder" else 2
        return hugging_face(folder / "x", stated, state, shards=shards)
    if container in TORCH:
        inner = state
        for word in reversed(wrapper.split("/") if wrapper else []):
            inner = LOGGED | {word: inner}
        whole = BESIDE | inner | (STATED[beside](stated) if stated else {})
        torch.save(whole, file, pickle_protocol=protocol)
    elif container == ".npz":
        np.savez(file, note="a text", **arrays, **stated)
    elif container == ".safetensors":
        save_file(state, file, {"config": json.dumps({"model": stated}), "note": "{not JSON"})
    elif container == "arrays":
        file = folder / "x.pickle"
        whole = {"params": arrays, "step": 3, "model_args": stated}
        file.write_bytes(pickle.dumps(whole, protocol))
    else:
        tree = {name: flax_array(array) for name, array in arrays.items()}
        file.write_bytes(msgpack.packb({"params": tree, "step": 3}))
        file.with_name("config.json").write_text(json.dumps(stated))
    return file


def stored(weights: Weights, *, y_first: bool, minus: bool, factor: float, scale: float) -> Weights:
    """The weights as code keeps them that orders its columns, signs or scales in another way; it writes whole tokens."""
    generator = torch.Generator().manual_seed(1)
    sign, own = (-1 if minus else 1) / factor, weights.scale / scale
    turn = weights.d_y if y_first else 0
    tensors = {name.removeprefix("attn."): tensor for name, tensor in weights.tensors.items()}
    changed = {name: tensors[name].roll(turn, 2) for name in ("W_K", "W_V")}
    changed["W_Q"] = own * tensors["W_Q"].roll(turn, 2)
    if weights.model.biases:
        changed["b_Q"] = own * tensors["b_Q"]
    for name in ("W_O", "b_O") if weights.model.biases else ("W_O",):
        x, y = tensors[name].split([weights.d_x, weights.d_y], -1)
        x = torch.randn(x.shape, generator=generator).to(y)
        changed[name] = torch.cat([x, sign * y], -1).roll(turn, -1)
    return weights.with_tensors({f"attn.{name}": tensor for name, tensor in changed.items()})


SIZES = st.fixed_dictionaries(
    {"n_heads": st.integers(1, 3), "d_x": st.integers(2, 4), "d_y": st.integers(1, 2)}
    | {"d_head": st.integers(2, 5), "seed": st.integers(0, 99)}
)
CHOICES = st.fixed_dictionaries(
    {"y_first": st.booleans(), "minus": st.booleans(), "to_self": st.booleans()}
    | {"factor": st.sampled_from([1.0, 0.25]), "scale": st.sampled_from([1.0, 0.4, None])}
    | {"score": st.sampled_from(SCORES), "bias": st.booleans(), "double": st.booleans()}
)
FILES = st.fixed_dictionaries(
    {
        "container": st.sampled_from(CONTAINERS),
        "wrapper": st.sampled_from(["", "state/model", *WRAPPERS]),
    }
    | {"protocol": st.integers(2, 5), "heads": st.sampled_from(["", *COUNTS["n_heads"]])}
    | {"beside": st.sampled_from(sorted(STATED))}
)
KEPT = ("wrapper", "protocol", "beside")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
BIASED = ("modules {", "output ", "behind ", "multihead", "arrays", "narrow arrays", "lens")


def require_read(layout: str, sizes: dict, choices: dict, file: dict) -> None:
    """A file of one layer is read as the weights that it was written from, and converted as them."""
    write, form, fixed = FORMATS.get(layout) or (LAYOUTS[layout], "", {})
    chosen = choices | fixed
    if "wide" in fixed:
        sizes = sizes | {"d_head": sizes["d_x"] + sizes["d_y"]}
    weights = random_heads(**sizes)
    if chosen["bias"] and layout.startswith(BIASED) and layout != "multihead, apart":
        weights = biased(weights)
    weights = weights.to(torch.float64 if chosen["double"] else torch.float32)
    weights = weights.with_model(score=chosen["score"], attend_to_self=chosen["to_self"])
    how = {name: chosen[name] for name in ("y_first", "minus", "factor")}
    scale = weights.scale if chosen["scale"] is None else chosen["scale"]
    narrow = fixed.keys() >= NARROW.keys()
    if narrow and layout not in ("merged", "separate"):
        queries = {name: tensor for name, tensor in weights.tensors.items() if name.endswith("_Q")}
        own = {name: tensor * weights.scale / scale for name, tensor in queries.items()}
        state = write(weights.with_tensors(own))
    else:
        state = write(weights if narrow else stored(weights, scale=scale, **how))
    minus = chosen["minus"] is not (layout == "haiku")
    hints = {"columns": "y,x" if chosen["y_first"] else "x,y", "sign": "minus" if minus else "plus"}
    hints |= {"score": chosen["score"], "output_scale": chosen["factor"], "d_y": sizes["d_y"]}
    hints |= {"attend_to_self": chosen["to_self"]} | fixed.get("hints", {"scale": scale})
    hints |= {"model": {"positions": "none"}}
    if layout.startswith("parameters"):
        hints["orientation"] = "in,out" if layout.endswith("[in, out]") else "out,in"
    beside = {file["heads"]: sizes["n_heads"]} if file["heads"] else {}
    hints |= {} if file["heads"] else {"n_heads": sizes["n_heads"]}
    with written(state, file["container"], beside, **{name: file[name] for name in KEPT}) as path:
        checkpoint = read(path, **hints)
        assert checkpoint.path == path
        require_converted(checkpoint, path.parent)
    found = checkpoint.weights
    torch.testing.assert_close(found.QK, weights.QK, **CLOSE)
    torch.testing.assert_close(found.OV, weights.OV, **CLOSE)
    prompts = draw_prompts(checkpoint.task, 16, seed=0, dtype=weights.dtype)
    torch.testing.assert_close(predict(found, prompts), predict(weights, prompts), **CLOSE)
    assert checkpoint.format == (form or checkpoint.format)
    assert checkpoint.config.model.n_heads == sizes["n_heads"]
    assert checkpoint.config.model.biases is weights.model.biases
    assert checkpoint.task.d_x == sizes["d_x"]
    assert not {"task.d_x", "task.d_y", "attn_scale"} & checkpoint.assumed.keys()
    assumed = {name for name in checkpoint.assumed if name.startswith("model.")}
    assert assumed <= {"model.attention_biases", "model.score_slope"}


def require_converted(checkpoint: Checkpoint, folder: Path) -> None:
    """From one of our formats to the next, the model stays the same."""
    model, written = checkpoint.config.model, checkpoint
    prompts = draw_prompts(checkpoint.task, 16, seed=0, dtype=checkpoint.weights.dtype)
    expected = checkpoint.predictor.predict(prompts)
    has_place = model.one_attention and model.score == "softmax" and not model.attend_to_self
    for target in ("native", "npz", *(["transformer-lens"] if has_place else []), "native"):
        out = folder / f"{written.path.stem}-{target}{'.npz' if target == 'npz' else ''}"
        convert(written, target, out)
        written = read(out, format="arrays" if target == "npz" else target)
        if not has_place:  # HookedTransformer has no merged heads
            assert_same(written.weights, checkpoint.weights)
        torch.testing.assert_close(written.predictor.predict(prompts), expected, **CLOSE)
        assert written.config == checkpoint.config
        assert written.assumed == json.loads(json.dumps(checkpoint.assumed_and_doubt))
    if not has_place:
        words = "softmax attention only|attends to itself|needs one layer of attention"
        assert_refused(words, convert, checkpoint, "transformer-lens", folder / "refused")


@pytest.mark.parametrize("layout", FORMATS)
@settings(max_examples=3, **SETTINGS)
@given(SIZES, CHOICES, FILES)
def test_a_format_is_read_as_it_was_written(layout: str, sizes: dict, choices: dict, file: dict):
    require_read(layout, sizes, choices, file)


@pytest.mark.slow
@settings(max_examples=50, **SETTINGS)
@given(st.sampled_from(sorted({**LAYOUTS, **FORMATS})), SIZES, CHOICES, FILES)
def test_one_layer_is_read_as_it_was_written(layout: str, sizes: dict, choices: dict, file: dict):
    require_read(layout, sizes, choices, file)


UNSAID = {"rms_norm", "sinusoidal_halves"}
"""How layers are joined, as no known setting of a file says it; nor is one on norms taken where a file has none."""
KINDS = st.builds(
    Kind,
    layers=st.integers(1, 3),
    layout=st.sampled_from(["pairs", "in_turn"]),
    positions=st.sampled_from(["none", "learned", "sines", "waves", "halves", "adjacent"]),
    norm=st.sampled_from(["none", "layer", "rms", "bare", "after"]),
    mlp=st.booleans(),
    activation=st.sampled_from(["gelu", "relu", "silu"]),
    scale=st.sampled_from(["head", "width"]),
    passes=st.integers(1, 2),
    base=st.sampled_from([50.0, 10000.0]),
    bias=st.booleans(),
    read_mlp=st.booleans(),
    seed=st.integers(0, 99),
)


@pytest.mark.slow
@settings(max_examples=30, **SETTINGS)
@given(KINDS, st.sampled_from(sorted(SPELLINGS)), st.sampled_from(["plain", "packed", "conv1d", "scan", "scan by heads"]), FILES)  # fmt: skip
def test_layers_predict_as_the_module_that_was_saved(
    kind: Kind, spelling: str, form: str, file: dict
):
    model = random_weights(kind)
    state = model.state_dict()
    if "scan" in form and (kind.mlp or kind.norm in ("layer", "rms", "after")):  # axes that tell
        state = scanned(state, kind.layers, heads="heads" in form)
    else:
        packed = form in ("packed", "conv1d") or spelling == "nanoGPT"
        conv1d = form == "conv1d" and spelling == "nanoGPT"
        state = spelled(state, spelling, packed=packed, conv1d=conv1d)
    width = kind.width if kind.scale == "width" else kind.width // kind.heads
    stated, said = {}, joins(kind)
    if file["heads"]:  # the file states what it can, too
        unsaid = UNSAID | ({"norm"} if kind.norm == "bare" else set())
        known = [name for name, value in said.items() if not {name, value} & unsaid]
        stated = {file["heads"]: kind.heads} | {name: said.pop(name) for name in known}
    hints = {"score": "softmax", "attend_to_self": True, "scale": width**-0.5, "model": said}
    hints |= {} if file["heads"] else {"n_heads": kind.heads}
    with written(state, file["container"], stated, **{name: file[name] for name in KEPT}) as path:
        checkpoint = read(path, task=TASK, **hints)
        require_converted(checkpoint, path.parent)
    ours, theirs = prediction(checkpoint, model)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    assert checkpoint.weights.n_layers == kind.layers * kind.passes
    assert len(checkpoint.readings) == 1


def test_every_spelling_of_the_table_is_known():
    words = {"x": "q", "X": "Q", "word": "query", "words": "queries", "Word": "Query"}
    spellings = [(part, each) for part, row in ROWS.items() for each in row]
    for part, spelling in (*spellings, *(("q", row.format(**words)) for row in PROJECTIONS)):
        for name in (f"{spelling}.weight", f"net.blocks.2.{spelling}.weight", f"net/{spelling}/w"):
            piece = piece_of(name)
            assert piece is not None, name
            assert (piece.part, piece.kind) == (part, "weight"), name
