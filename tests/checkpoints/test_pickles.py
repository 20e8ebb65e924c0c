"""Pickles that hang, crash or fill the memory of those who build what they say; and those that hold more than tensors."""

import io
import pickle
import struct
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.checkpoints.io.tensor_files import read_arrays
from mechinterp.checkpoints.io.unpickler import read_pickle
from tests.checkpoints.files import assert_refused, saved
from tests.checkpoints.files import read as load
from tests.checkpoints.foreign_files import whole_run
from tests.checkpoints.test_archives import little, with_pickle

# A tuple 60 deep, each one twice in the next: 2**60 leaves in 240 bytes.
DOUBLED = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
DEEP = b")" + b"\x85" * 200_000
ORDERED, TENSOR = b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\n%bX\x03\0\0\0cpuK\x04tQ"
WORD = STORAGE % b"X\x01\0\0\x000"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n)R"
STATE = b"(K\1(%btcnumpy\ndtype\n(X\x02\0\0\0f4K\0K\1tR\x89C\x04\0\0\0\0t"


def in_state(value: bytes) -> bytes:
    """A pickle of {"W": value}."""
    return b"}X\x01\0\0\0W" + value + b"s"


def called(function: bytes, arguments: bytes) -> bytes:
    return function + b"(" + arguments + b"tR"


HOSTILE: dict[str, tuple[bytes, str]] = {
    "the key of a dictionary": (b"}" + DOUBLED + b"Ns", "must hold a state dict"),
    "the key of a storage": (STORAGE % DOUBLED, "a storage without a name"),
    "the class of a storage": (b"(X\x07\0\0\0storage" + DOUBLED + b"K\0K\0K\0tQ", "a storage without"),
    "a persistent id": (DOUBLED + b"Q", "a storage without a name"),
    "the key of an OrderedDict": (in_state(called(ORDERED, b"(" + DOUBLED + b"N\x86t")), "needs collections"),
    "an item of an OrderedDict": (called(ORDERED, b"") + DOUBLED + b"Ns", "must hold a state dict"),
    "an argument": (in_state(called(b"ctorch\nSize\n", DOUBLED)), "needs torch.Size"),
    "a dtype": (in_state(called(b"ctorch\ndevice\n", DOUBLED)), "needs torch.device"),
    "the shape of a tensor": (in_state(called(TENSOR, WORD + b"K\0" + DOUBLED + b")\x89)")), "needs"),
    "a function": (DOUBLED + b")R", "must hold a state dict"),
    "the class of an object": (DOUBLED + b")\x81", "must hold a state dict"),
    "the name of a class": (DOUBLED + DOUBLED + b"\x93", "a name that is no short text"),
    "a set": (b"\x8f(" + DOUBLED + b"\x90", "must hold a state dict"),
    "a frozen set": (b"(" + DOUBLED + b"\x91", "must hold a state dict"),
    "the state of an object": (called(ORDERED, b"") + DOUBLED + b"b" + b"K\1Ns", "must hold a state dict"),
    "the root": (DOUBLED, "must hold a state dict"),
    "a value": (in_state(DOUBLED), "must hold a state dict"),
    "deep value": (in_state(DEEP), "must hold a state dict"),
    "deep dictionaries": (b"}X\x01\0\0\0a" * 70_000 + b"N" + b"s" * 70_000, "must hold a state dict"),
    "itself": (b"}q\0X\x05\0\0\0modelh\0s", "must hold a state dict"),
    "a long name": (
        b"X" + struct.pack("<I", 10**7) + b"a" * 10**7 + b"q\0" + b"h\0h\0\x93" * 90_000,
        "a name that is no short text",
    ),
    "an integer": (in_state(b"\x8b" + struct.pack("<I", 10**7) + b"\x7f" * 10**7), "must hold a state dict"),
    "a shape of 10**6 axes": (
        in_state(called(TENSOR, WORD + b"K\0(" + b"K\1" * 90_000 + b"t(" + b"K\1" * 90_000 + b"t")),
        "at most 64 axes",
    ),
    "a shape beyond 64 bits": (
        in_state(called(TENSOR, WORD + b"K\0" + b"\x8a\x08" + b"\xff" * 7 + b"\x7f2\x86K\0K\0\x86")),
        "must lie in 340282366920938463389587631136930004996 bytes, got 16",
    ),
    "a start before the numbers": (in_state(called(TENSOR, WORD + b"J\xff\xff\xff\xffK\1\x85K\1\x85")), "behind the start"),
    "strides beyond the numbers": (in_state(called(TENSOR, WORD + b"K\1K\2\x85K\3\x85")), "within its 4 numbers, it goes to number 5"),
    "one entry as two kinds": (
        b"}X\x01\0\0\0W" + called(TENSOR, WORD + b"K\0K\4\x85K\1\x85") + b"sX\x01\0\0\0b"
        + called(TENSOR, WORD.replace(b"Float", b"Int") + b"K\0K\4\x85K\1\x85") + b"s",
        "data/0 must hold numbers of one kind",
    ),
    "the shape of a numpy array": (ARRAY + STATE % DOUBLED + b"b", "one tensor of shape"),
    "the shape of an array in a dictionary": (in_state(ARRAY + STATE % DOUBLED + b"b"), "must hold a state dict"),
    "no stack": (b"\x86", "got no pickle"),
    "no memo": (b"h\0", "got no pickle"),
    "no mark": (b"t", "got no pickle"),
    "no value": (b"}(Nu", "got no pickle"),
    "nothing": (b"", "got no pickle"),
    "protocol 0": (b"I1\n", "no pickle of protocol 2 to 5: b'I'"),
    "an extension": (b"\x82\1", "no pickle of protocol 2 to 5"),
}  # fmt: skip


def archive(file: Path, value: bytes) -> Path:
    with_pickle(file, b"\x80\x02" + value + b".")
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("pickled", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_ends_in_one_line(tmp_path: Path, pickled: bytes, words: str):
    file = archive(tmp_path / "x.pth", pickled)
    with little():
        assert assert_refused(words, load, file).startswith(f"{file}: ")


@pytest.mark.parametrize("junk", [DOUBLED, DEEP], ids=["doubled", "deep"])
def test_what_is_no_weight_costs_nothing(tmp_path: Path, junk: bytes):
    state = in_state(called(TENSOR, WORD + b"K\0K\2K\2\x86K\1K\2\x86\x89)"))
    pickled = b"}X\x05\0\0\0model" + state + b"sX\x03\0\0\0log" + junk + b"s"
    with little():
        tensors = read_arrays(archive(tmp_path / "x.pth", pickled))
    assert torch.equal(tensors["W"], torch.ones(2, 2))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_those_that_were_pickled(protocol: int):
    values = {
        "a": 1,
        2: -(2**40),
        "c": 2.5,
        "d": "\u00e9" * 300,
        "e": None,
        "f": True,
        "g": b"x" * 3,
    }
    values |= {"h": (1, ("a", 300)), "i": 70_000, "j": {"k": {}}, "l": 255}
    value = read_pickle(pickle.dumps(values, protocol))
    if protocol == 2:  # which has no bytes
        assert value.pop("g") == "xxx"
        values.pop("g")
    assert value == values


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ],
)  # fmt: skip
def test_tensors_of_every_kind_and_layout(tmp_path: Path, dtype: torch.dtype):
    numbers = torch.arange(24).to(dtype)
    state = {
        "all": numbers.view(2, 3, 4),
        "part": numbers[3:9].view(2, 3).T,
        "every other": numbers[::2],
        "one": numbers[5],
        "same": numbers[:1].expand(1, 1),
        "none": numbers[:0].view(0, 3),
        "parameter": torch.nn.Parameter(numbers[:4], requires_grad=False),
    }
    torch.save(state, tmp_path / "x.pth")
    tensors = read_arrays(tmp_path / "x.pth")
    expected = torch.load(tmp_path / "x.pth", weights_only=True)
    assert list(tensors) == list(state)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors.values())
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor.to(tensors[name].dtype)), name
        assert tensors[name].dtype == (
            torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
        )


def test_the_byte_order_of_another_machine(tmp_path: Path):
    stream = io.BytesIO()
    torch.save({"W": torch.tensor([1.5, -2.0])}, stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(tmp_path / "x.pth", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("byteorder"):
                data = b"big" if sys.byteorder == "little" else b"little"
            elif "/data/" in name:
                data = np.frombuffer(data, "<f4").byteswap().tobytes()
            target.writestr(name, data)
    assert read_arrays(tmp_path / "x.pth")["W"].tolist() == [1.5, -2.0]


@pytest.mark.slow
def test_a_long_run_is_read_in_seconds(tmp_path: Path):
    """Of the published length: 500,001 losses and, for eight heads, 9,000 logged tensors are no bomb."""
    heads, logs = 8, 501
    state = {f"attention_layer.{x}_proj.weight": torch.ones(6 * heads, 6) for x in "qkv"}
    state["attention_layer.o_proj.weight"] = torch.ones(1, 6 * heads)
    run = whole_run(state) | {"training_losses": torch.rand(500_001).tolist()}
    for name in ("qk_dynamics", "ov_dynamics"):
        run[name] = [[torch.rand(()) for _ in range(logs)] for _ in range(heads)]
    run |= {"qk_matrices": list(torch.rand(logs, heads, 6, 6).clone().unbind()), "n": [0.1] * logs}
    file = saved(tmp_path, run)
    start = time.process_time()
    assert load(file).config.model.n_heads == heads
    assert time.process_time() - start < 5  # half of it where nothing else runs
