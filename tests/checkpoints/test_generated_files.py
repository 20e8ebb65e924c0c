"""Files written from known weights, in drawn combinations of layout, container and options, are read as those weights."""

import argparse
import json
import pickle
import tempfile
from collections.abc import Iterator
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
from mechinterp.checkpoints.foreign.names import PROJECTIONS, ROWS, piece_of
from mechinterp.checkpoints.foreign.read import COUNTS
from mechinterp.checkpoints.io.tensor_files import WRAPPERS
from mechinterp.config import SCORES
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights
from tests.checkpoints.files import hugging_face, read
from tests.checkpoints.foreign_files import random_heads
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
from tests.checkpoints.wild_files import LAYOUTS, State
from tests.conftest import by_head

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
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pkl")
CONTAINERS = (*TORCH, ".npz", ".safetensors", "arrays", ".msgpack", "folder", "shards")


def flax_array(array: np.ndarray) -> msgpack.ExtType:
    packed = msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
    return msgpack.ExtType(1, packed)


@contextmanager
def written(
    state: State,
    container: str,
    stated: dict[str, object],
    *,
    wrapper: str = "model",
    protocol: int = 2,
) -> Iterator[Path]:
    """A file, or a folder, with a state dict and settings, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"x{container}"
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        if container in ("folder", "shards"):
            file = Path(folder) / "x"
            hugging_face(file, stated, state, shards=1 if container == "folder" else 2)
        elif container in TORCH:
            inner = state
            for word in reversed(wrapper.split("/") if wrapper else []):
                inner = LOGGED | {word: inner}
            whole = BESIDE | inner | ({"config": stated} if stated else {})
            torch.save(whole, file, pickle_protocol=protocol)
        elif container == ".npz":
            np.savez(file, note="a text", **arrays, **stated)
        elif container == ".safetensors":
            save_file(state, file, {"config": json.dumps({"model": stated}), "note": "{not JSON"})
        elif container == "arrays":
            file = Path(folder) / "x.pickle"
            whole = {"params": arrays, "step": 3, "model_args": stated}
            file.write_bytes(pickle.dumps(whole, protocol))
        else:
            tree = {name: flax_array(array) for name, array in arrays.items()}
            file.write_bytes(msgpack.packb({"params": tree, "step": 3}))
            file.with_name("config.json").write_text(json.dumps(stated))
        yield file


def stored(weights: Weights, *, y_first: bool, minus: bool, factor: float, scale: float) -> Weights:
    """The weights as code keeps them that orders its columns, signs or scales in another way; it writes whole tokens."""
    writes = torch.randn(weights.n_heads, weights.d_head, weights.d_x)
    W_O = torch.cat([writes.to(weights.W_O), by_head(weights)["W_O"]], 2)
    W_O = W_O * (-1 if minus else 1) / factor
    turn = weights.d_y if y_first else 0
    reads = {f"attn.W_{x}": getattr(weights, f"W_{x}").roll(turn, 2) for x in "QKV"}
    reads["attn.W_Q"] = reads["attn.W_Q"] * weights.scale / scale
    return weights.with_tensors(reads | {"attn.W_O": W_O.roll(turn, 2)[None]})


SIZES = st.fixed_dictionaries(
    {"n_heads": st.integers(1, 3), "d_x": st.integers(2, 4), "d_y": st.integers(1, 2)}
    | {"d_head": st.integers(2, 5), "seed": st.integers(0, 99)}
)
CHANGES = st.fixed_dictionaries(
    {"y_first": st.booleans(), "minus": st.booleans()}
    | {"factor": st.sampled_from([1.0, 0.25]), "scale": st.sampled_from([1.0, 0.4])}
)
FILES = st.fixed_dictionaries(
    {
        "container": st.sampled_from(CONTAINERS),
        "wrapper": st.sampled_from(["", "state/model", *WRAPPERS]),
    }
    | {"protocol": st.integers(2, 5), "heads": st.sampled_from(["", *COUNTS["n_heads"]])}
)


def require_known(checkpoint: Checkpoint, weights: Weights) -> None:
    """Circuits, and predictions, of known weights."""
    circuits = checkpoint.weights
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(circuits.QK, weights.QK, **close)
    torch.testing.assert_close(circuits.OV, weights.OV, **close)
    prompts = sample_prompts(checkpoint.task, 16, seed=0, dtype=weights.dtype)
    torch.testing.assert_close(predict(circuits, prompts), predict(weights, prompts), **close)


@pytest.mark.slow
@settings(max_examples=60, **SETTINGS)
@given(st.sampled_from(sorted(LAYOUTS)), SIZES, CHANGES, FILES, st.sampled_from(SCORES), st.booleans(), st.booleans())  # fmt: skip
def test_one_layer_is_read_as_it_was_written(
    layout: str, sizes: dict, changes: dict, file: dict, score: str, to_self: bool, double: bool
):
    weights = random_heads(**sizes).to(torch.float64 if double else torch.float32)
    weights = weights.with_model(score=score, attend_to_self=to_self)
    state = LAYOUTS[layout](stored(weights, **changes))
    minus = changes["minus"] is not (layout == "haiku")
    hints = {
        "columns": "y,x" if changes["y_first"] else "x,y",
        "sign": "minus" if minus else "plus",
    }
    hints |= {"score": score, "scale": changes["scale"], "output_scale": changes["factor"]}
    hints |= {"attend_to_self": to_self, "d_y": sizes["d_y"], "model": {"positions": "none"}}
    if layout.startswith("parameters"):
        hints["orientation"] = "in,out" if layout.endswith("[in, out]") else "out,in"
    beside = {file["heads"]: sizes["n_heads"]} if file["heads"] else {}
    hints |= {} if file["heads"] else {"n_heads": sizes["n_heads"]}
    how = {"wrapper": file["wrapper"], "protocol": file["protocol"]}
    with written(state, file["container"], beside, **how) as path:
        checkpoint = read(path, **hints)
        assert checkpoint.path == path
    require_known(checkpoint, weights)
    assert (checkpoint.config.model.n_heads, checkpoint.task.d_x) == (
        sizes["n_heads"],
        sizes["d_x"],
    )
    assert not {"task.d_x", "task.d_y", "attn_scale"} & checkpoint.assumed.keys()
    assumed = {name for name in checkpoint.assumed if name.startswith("model.")}
    assert assumed <= {"model.attention_biases", "model.score_slope"}


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
@settings(max_examples=60, **SETTINGS)
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
    hints = {"score": "softmax", "attend_to_self": True, "scale": width**-0.5, "model": joins(kind)}
    if file["heads"]:
        stated = {file["heads"]: kind.heads}
    else:
        stated, hints["n_heads"] = {}, kind.heads
    how = {"wrapper": file["wrapper"], "protocol": file["protocol"]}
    with written(state, file["container"], stated, **how) as path:
        checkpoint = read(path, task=TASK, **hints)
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
