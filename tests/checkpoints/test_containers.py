"""Files as people keep them: what lies around the weights, and refusals that name what was found."""

import argparse
import pickle
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch

from mechinterp.checkpoints.foreign.names import piece_of
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.tensor_files import WRAPPERS, read_arrays
from mechinterp.checkpoints.io.unpickler import MAX_BYTES
from tests.checkpoints.files import assert_refused, loaded
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import random_heads
from tests.checkpoints.wild_files import LAYOUTS, State, matrices

HEADS = random_heads()
STATE = LAYOUTS["modules {x}_proj"](HEADS)
BESIDE = {
    "loss": np.float64(0.5),
    "losses": np.ones(3),
    "kind": np.dtype("f4"),
    "args": argparse.Namespace(lr=0.1, out=Path("a")),
    "path": Path("b"),
    "device": torch.device("cpu"),
    "epoch": 3,
    "name": None,
}


def same(tensors: State, expected: State) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pkl"])
def test_what_lies_beside_the_weights(tmp_path: Path, ending: str, protocol: int):
    file = tmp_path / f"x{ending}"
    torch.save(BESIDE | STATE, file, pickle_protocol=protocol)
    same(read_arrays(file), STATE)


class Trainer:
    """Pickled by its name and its attributes."""

    def __init__(self) -> None:
        self.step = 3


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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(tmp_path: Path, name: str, protocol: int):
    torch.save(BESIDE | LOGGED | {name: STATE}, tmp_path / "x.pt", pickle_protocol=protocol)
    same(read_arrays(tmp_path / "x.pt"), STATE)
    torch.save({"checkpoint": 1, "state": {name: STATE}}, tmp_path / "x.pt")
    same(read_arrays(tmp_path / "x.pt"), STATE)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<i8", "|u1", "?"])
def test_dictionaries_of_numpys_arrays(tmp_path: Path, protocol: int, kind: str):
    array = np.arange(6).reshape(2, 3).astype(kind)
    arrays = {"a": array, "t": array.T, "none": array[:0], "loss": np.float32(1)}
    nested = {"net/~/key": {"w": array}, "step": 3}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(arrays, protocol))
    tensors = read_arrays(tmp_path / "x.pkl")
    assert list(tensors) == ["a", "t", "none"]
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"params": nested}, protocol))
    assert list(read_arrays(tmp_path / "x.pkl")) == ["net/~/key.w"]


def flax_array(array: np.ndarray) -> msgpack.ExtType:
    packed = msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
    return msgpack.ExtType(1, packed)


def test_flax(tmp_path: Path):
    arrays = {x: matrix.T.numpy() for x, matrix in matrices(HEADS).items()}
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    tree = {"params": {"attn": {names[x]: {"kernel": flax_array(a)} for x, a in arrays.items()}}}
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(tree | {"step": 3}))
    checkpoint = load(
        tmp_path / "x.msgpack", score="softmax", scale=HEADS.scale, n_heads=2, columns="x,y"
    )
    torch.testing.assert_close(checkpoint.weights.circuits.QK, HEADS.QK)


BROKEN = {
    "shape": ((7, 3), b"float32", bytes(24)),
    "negative": ((-2, -3), b"float32", bytes(24)),
    "huge": ((2**40, 2**40), b"float32", bytes(24)),
    "kind": ((2, 3), b"bfloat16", bytes(12)),
    "objects": ((2, 3), b"object", bytes(48)),
    "axes": ((1,) * 40, b"float32", bytes(4)),
}


@pytest.mark.parametrize("parts", BROKEN.values(), ids=BROKEN)
def test_arrays_that_claim_what_they_do_not_hold(tmp_path: Path, parts: tuple):
    tree = {"a": msgpack.ExtType(1, msgpack.packb(parts))}
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(tree))
    with pytest.raises(CheckpointError, match=r"must (lie|have|hold)") as error:
        read_arrays(tmp_path / "x.msgpack")
    assert str(error.value).isprintable()


def test_one_array_under_many_names(tmp_path: Path):
    array = np.zeros(100_000)
    run = {str(i): array for i in range(40)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(run))
    assert (tmp_path / "x.pkl").stat().st_size < MAX_BYTES / 10
    assert_refused("must lie in 24000000 bytes together", read_arrays, tmp_path / "x.pkl")


def scripted(file: Path) -> None:
    import zipfile

    torch.save(STATE, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("x/constants.pkl", b"")


REFUSED = {
    "a pointer": (
        lambda f: f.write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "a Git LFS pointer of 63 bytes, not the weights; run git lfs pull",
    ),
    "a module": (
        lambda f: torch.save(torch.nn.Linear(2, 2), f),
        r"needs torch\.nn\.modules\.linear\.Linear.*torch\.save\(model\.state_dict\(\), FILE\)",
    ),
    "TorchScript": (scripted, r"a TorchScript archive.*torch\.jit\.load\(FILE\)\.state_dict\(\)"),
}


@pytest.mark.parametrize(("write", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_what_it_is(tmp_path: Path, write, words: str):
    write(tmp_path / "x.pt")
    assert_refused(words, load, tmp_path / "x.pt")


@pytest.mark.slow
def test_the_names_that_a_refusal_offers_are_those_that_are_read(tmp_path: Path):
    known = {f"{x}_proj": torch.randn(6, 6) for x in "qkvo"}
    known |= {"read_in": torch.randn(6, 4), "read_out": torch.randn(1, 6)}
    hints = {"n_heads": 2, "score": "softmax", "attend_to_self": False}
    theirs = {name: f"mine{number}" for number, name in enumerate(known)}
    with pytest.raises(CheckpointError, match="--map THEIRS=KNOWN") as refused:
        loaded(tmp_path, {f"{theirs[n]}.weight": t for n, t in known.items()}, **hints)
    listed = str(refused.value).partition("KNOWN is one of ")[2].removesuffix(".").split(", ")
    assert set(known) <= set(listed)
    assert all(name == "mask" or piece_of(name) for name in listed)
    rows = [f"{mine}={name}" for name, mine in theirs.items()]
    checkpoint = load(tmp_path / "x.pt", map=rows, **hints)
    torch.save({f"{n}.weight": t for n, t in known.items()}, tmp_path / "y.pt")
    same(checkpoint.weights.tensors, load(tmp_path / "y.pt", **hints).weights.tensors)


@pytest.mark.slow
def test_harmless_buffers_are_ignored_and_named(tmp_path: Path):
    buffers = {
        "attn.mask": torch.ones(9, 9).tril(),
        "attn.bias": torch.ones(1, 1, 9, 9),
        "loss_fn.pos_weight": torch.ones(1),
        "attn.tril": torch.ones(9, 9),
    }
    checkpoint = loaded(tmp_path, STATE | buffers, n_heads=2)
    assert checkpoint.assumed["ignored"] == list(buffers)


@pytest.mark.slow
def test_a_folder_with_one_file_of_weights(tmp_path: Path):
    torch.save(STATE, tmp_path / "a.pt")
    assert load(tmp_path, n_heads=2).path == tmp_path
    torch.save(STATE, tmp_path / "b.ckpt")
    assert_refused(r"several files of weights; name one of a\.pt, b\.c", load, tmp_path)


@pytest.mark.slow
def test_a_config_beside_the_weights_states_the_heads(tmp_path: Path):
    torch.save(STATE, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    assert load(tmp_path / "a.pt").config.model.n_heads == 2
