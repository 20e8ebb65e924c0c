"""Hostile files end in one line, soon and in little memory; no code of theirs runs, nothing is left behind."""

import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mechinterp.checkpoints.io import tensor_files
from mechinterp.checkpoints.io.files import CheckpointError, printable, read_json
from mechinterp.checkpoints.io.tensor_files import read_arrays
from mechinterp.checkpoints.io.unpickler import MAX_BYTES
from tests.checkpoints.files import assert_refused
from tests.checkpoints.files import read as load
from tests.checkpoints.test_generated_files import write as written

SECONDS, BYTES = 2, 500 * 2**20
Write = Callable[[Path], object]


@contextmanager
def little() -> Iterator[None]:
    """Fails when the block takes more than two seconds of the processor or 500 MB."""
    before, start = peak(), time.process_time()
    yield
    assert time.process_time() - start < SECONDS
    assert peak() - before < BYTES


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Touch:
    """Pickled, it creates a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def weights(file: Path) -> dict[str, object]:
    return {"W": torch.ones(2, 2), "ran": Touch(file.with_name("ran"))}


def repacked(file: Path, change: Callable[[str, bytes], bytes], method: int = 0) -> None:
    """A small torch file, its entries changed."""
    stream = io.BytesIO()
    torch.save({"W": torch.ones(4)}, stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(file, "w", method) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, change(entry.filename, source.read(entry)))


def asking(module: str, name: str, *arguments: object) -> Write:
    return lambda file: with_pickle(file, asks(module, name, *arguments))


def pickled(value: bytes) -> Write:
    return lambda file: with_pickle(file, b"\x80\x02" + value)


def objects(save: Callable[[Path, np.ndarray], None]) -> Write:
    """numpy's file of an object that runs code when it is read."""
    return lambda file: save(file, np.array([Touch(file.with_name("ran"))], dtype=object))


def with_pickle(file: Path, pickled: bytes) -> None:
    repacked(file, lambda name, data: pickled if name.endswith("data.pkl") else data)


def longer(name: str, data: bytes) -> bytes:
    # The four numbers of the storage, and of the tensor, become a million.
    return data.replace(b"K\x04", b"J\x00\x00\x10\x00") if name.endswith("data.pkl") else data


def bomb(file: Path) -> None:
    chunk = bytes(2**24)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        name = "W_Q.npy" if file.suffix == ".npz" else "archive/data/0"
        with archive.open(name, "w", force_zip64=True) as stream:
            for _ in range(20):
                stream.write(chunk)


def claims(size: int, *, packed: bool = False) -> Write:
    """An archive whose directory claims this size for a tiny deflated entry, of the archive or unpacked."""

    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(100))
        data = bytearray(file.read_bytes())
        at = data.rindex(b"PK\x01\x02")
        place = at + (20 if packed else 24)
        data[place : place + 4] = struct.pack("<I", size)
        file.write_bytes(data)

    return write


def overlapping(file: Path) -> None:
    """A thousand directory entries that share one stored entry of a million bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data/0000", bytes(2**20))
    data = file.read_bytes()
    at = data.rindex(b"PK\x01\x02")
    end = data.rindex(b"PK\x05\x06")
    entry = data[at:end]
    entries = b"".join(entry.replace(b"data/0000", f"data/{i:04}".encode()) for i in range(1000))
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(entries), at, 0)
    file.write_bytes(data[:at] + entries + tail)


def crowded(file: Path) -> None:
    entry = b"PK\x01\x02" + bytes(42)
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, 46 * 200_000, 4, 0)
    file.write_bytes(b"PK\x03\x04" + entry * 200_000 + tail)


def twice(file: Path) -> None:
    repacked(file, lambda name, data: data)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data.pkl", b"x")


def asks(module: str, name: str, *arguments: object) -> bytes:
    """A pickle, protocol 2, of module.name(*arguments)."""
    inner = pickle.dumps(arguments, protocol=2)[2:-1]
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + inner + b"R."


def npy(
    shape: str, *, dtype: str = "<f4", data: bytes = b"", version: bytes = b"\x01\x00"
) -> bytes:
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


def npz(*arrays: bytes, name: str = "W_Q.npy", method: int = 0) -> Write:
    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w", method) as archive:
            for array in arrays:
                archive.writestr(name, array)

    return write


def safetensors(header: object, *, length: int | None = None, data: bytes = b"") -> Write:
    def write(file: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        claimed = len(text) if length is None else length
        file.write_bytes(struct.pack("<Q", claimed) + text + data)

    return write


def flax(*parts: object) -> Write:
    """A tree of flax with an array of these parts: shape, kind and bytes."""
    tree = {"a": msgpack.ExtType(1, msgpack.packb(parts))}
    return lambda file: file.write_bytes(msgpack.packb(tree))


def many_names(file: Path) -> None:
    array = np.zeros(100_000)
    file.write_bytes(pickle.dumps({str(i): array for i in range(40)}))
    assert file.stat().st_size < MAX_BYTES / 10


def tensor_header(shape: list[int], end: int, dtype: str = "F32") -> dict[str, object]:
    return {"W_Q": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


def saves(make: Callable[[], object]) -> Write:
    return lambda file: torch.save(make(), file)


HOSTILE: dict[str, tuple[str, Write, str]] = {
    "code": (".pt", lambda f: torch.save(weights(f), f), "needs (io|_io|builtins).open, and no code of a file is run"),
    "nested code": (".pt", lambda f: torch.save({"model": {"a": [weights(f)]}}, f), "must hold a state dict"),
    "a tensor alone": (".pt", saves(lambda: torch.ones(2)), "must hold a state dict"),
    "numbers as names": (".pt", saves(lambda: {1: torch.ones(2)}), "must hold a state dict"),
    "no tensors": (".pt", saves(dict), "must hold a state dict"),
    "noise": (".pt", lambda f: f.write_text("x"), "as torch.save writes them; got another file"),
    "plain pickle": (".pt", lambda f: f.write_bytes(pickle.dumps(weights(f))), "a plain pickle, from which only numpy arrays"),
    "old torch": (
        ".pth",
        lambda f: torch.save({"W": torch.ones(1)}, f, _use_new_zipfile_serialization=False),
        r"save it again with PyTorch >= 1\.6",
    ),
    "pickled npz": (".npz", objects(np.savez), "arr_0 must hold plain numbers, got object"),
    "pickled npy": (".npy", objects(np.save), "must hold plain numbers, got object"),
    "eval": (".pt", asking("builtins", "eval", "1"), "needs builtins.eval"),
    "system": (".pt", asking("os", "system", "true"), "needs os.system"),
    "long storage": (".pt", lambda f: repacked(f, longer), "data/0 must have 4194304 bytes, got 16"),
    "long pickle": (".pt", pickled(b"}" * 13_000_000), "got a pickle of 13000002 bytes"),
    "many opcodes": (".pt", pickled(b"}" * 5_900_000), "more than 300000 steps"),
    "hidden opcodes": (".pt", pickled(b"KG}}}}}}}}" * 100_000), "more than 300000 steps"),
    "no opcode": (".pt", pickled(b"\xff"), "got no pickle"),
    "deep pickle": (".pt", pickled(b"]" * 100_000 + b"a" * 99_999 + b"."), "state dict"),
    "view of 2**40": (".pt", saves(lambda: {"W_Q": torch.ones(1).expand(2**40)}), "must lie in 4398046511104 bytes, got 4"),
    "views of one": (
        ".pt",
        saves(lambda: (lambda t: {str(i): t.T for i in range(200)})(torch.ones(1000, 1000))),
        "must hold at most 67108864 numbers, got 200000000",
    ),
    "sparse": (".pt", saves(lambda: {"W_Q": torch.eye(3).to_sparse()}), r"needs torch\._utils\._rebuild_sparse"),
    "meta": (".pt", saves(lambda: {"W_Q": torch.ones(3, device="meta")}), r"needs torch\._utils\._rebuild_meta"),
    "torch bomb": (".pt", bomb, "without running code|must unpack to at most"),
    "npz bomb": (".npz", bomb, "must unpack to at most 67108864 bytes, it claims 335544320"),
    "claimed size": (".pt", claims(2**32 - 2), "must unpack to at most"),
    "small claimed size": (".pt", claims(2**20), "not a readable PyTorch file|without running"),
    "claimed packed size": (".pt", claims(2**31, packed=True), "at most the file's [0-9]+ bytes, it claims 2147483648"),
    "overlap": (".pt", overlapping, "must unpack to at most|not a readable"),
    "crowded": (".pt", crowded, "at most 30000 entries, got 200000"),
    "twice": (".pt", twice, "each entry once"),
    "lzma": (".pt", lambda f: repacked(f, lambda _, d: d, zipfile.ZIP_LZMA), "stored or deflated, got compression 14"),
    "no pickle": (".pt", npz(b"x", name="archive/data/0"), "got an archive with 0 pickles"),
    "not an array": (".npz", npz(b"x", name="W_Q.txt"), r"must hold \.npy arrays, got W_Q\.txt"),
    "npy of 2**40": (".npz", npz(npy("(1099511627776,)")), "must lie in 4398046511104 bytes, got 0"),
    "npy of nothing": (".npz", npz(npy("(0, 1099511627776)", data=b"x")), "must lie in 0 bytes, got 1"),
    "npy negative": (".npz", npz(npy("(-2, -2)", data=bytes(16))), "not a readable|must lie"),
    "npy code": (".npz", npz(npy("__import__('os').system('true')")), "not a readable npz file"),
    "npy nested": (".npz", npz(npy("(" * 4000)), "not a readable npz file"),
    "npy texts": (".npz", npz(npy("(1,)", dtype="|S4", data=bytes(4))), "must hold numbers, got"),
    "npy version": (".npz", npz(npy("(1,)", version=b"\x03\x00")), "version 1.0 or 2.0, got"),
    "npy huge text": (".npz", npz(npy("()", dtype="<U1099511627776")), "not a readable|must lie in"),
    "safetensors 2**60": (".safetensors", safetensors({}, length=2**60), "it claims 1152921504606846976"),
    "safetensors empty": (".safetensors", lambda f: f.write_bytes(b""), "claims 0"),
    "safetensors short": (".safetensors", lambda f: f.write_bytes(b"\x02\0\0\0\0\0\0\0{"), "1 to 1 bytes, it claims 2"),
    "safetensors long header": (".safetensors", safetensors(b" " * (2**22)), "1 to 2097152 bytes"),
    "safetensors not JSON": (".safetensors", safetensors(b"{"), "not a readable safetensors"),
    "safetensors deep": (".safetensors", safetensors(b"[" * 500_000), "not a readable safetensors"),
    "safetensors shape": (".safetensors", safetensors(tensor_header([2**40], 4), data=bytes(4)), "not a readable"),
    "safetensors dtype": (".safetensors", safetensors(tensor_header([1], 4, "X"), data=bytes(4)), "not a readable"),
    "unsigned": (".safetensors", safetensors(tensor_header([2], 4, "U16"), data=bytes(4)), "got torch.uint16"),
    "flax shape": (".msgpack", flax((7, 3), b"float32", bytes(24)), "must lie"),
    "flax negative": (".msgpack", flax((-2, -3), b"float32", bytes(24)), "must (lie|have|hold)"),
    "flax huge": (".msgpack", flax((2**40, 2**40), b"float32", bytes(24)), "must (lie|have|hold)"),
    "flax kind": (".msgpack", flax((2, 3), b"bfloat16", bytes(12)), "must (lie|have|hold)"),
    "flax objects": (".msgpack", flax((2, 3), b"object", bytes(48)), "must (lie|have|hold)"),
    "flax axes": (".msgpack", flax((1,) * 40, b"float32", bytes(4)), "must (lie|have|hold)"),
    "one array under many names": (".pkl", many_names, "must lie in 24000000 bytes together"),
    "empty": (".pt", lambda f: f.write_bytes(b""), "an empty file"),
    "sparse gigabytes": (".pt", lambda f: f.touch() or os.truncate(f, 2**40), "at most 268435456 bytes, got"),
}  # fmt: skip


@pytest.mark.parametrize(("suffix", "write", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_ends_in_one_line(tmp_path: Path, suffix: str, write: Write, words: str):
    file = tmp_path / f"x{suffix}"
    write(file)
    with little():
        message = assert_refused(words, load, file)
    assert message.startswith(f"{file}: ")
    assert "weights_only" not in message  # as PyTorch's own message recommends
    assert [left.name for left in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("suffix", tensor_files.SUFFIXES)
def test_noise_and_truncated_files(tmp_path: Path, suffix: str):
    file = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(file, np.ones((3, 3), np.float32))
    else:
        tensors = {"W": torch.ones(3, 3), "b": torch.ones(3)}
        container = {".pt.tar": ".pt", ".pickle": ".pkl"}.get(suffix, suffix)
        written(tmp_path, tensors, container, {}, wrapper="").rename(file)
    whole = file.read_bytes()
    assert torch.equal(read_arrays(file)["W"], torch.ones(3, 3))
    for size in range(0, len(whole), max(1, len(whole) // 60)):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_arrays(file)
    file.write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(CheckpointError):
        read_arrays(file)


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path: Path):
    file = tmp_path / "x.pt"
    torch.save({"W": torch.full((64,), 1.5)}, file)
    data = bytearray(file.read_bytes())
    data[data.index(struct.pack("<f", 1.5) * 3) + 2] ^= 1
    file.write_bytes(data)
    assert_refused("not a readable PyTorch file", read_arrays, file)


def test_directories_devices_and_missing_files(tmp_path: Path):
    for path in (tmp_path / "gone.pt", tmp_path / "gone.npz", tmp_path / "gone.safetensors"):
        assert_refused("does not exist", read_arrays, path)
    assert_refused("must be a regular file, got a folder", read_arrays, tmp_path)
    for path in (tmp_path / ("x" * 5000), Path("/dev/null"), tmp_path / "a\0b.pt"):
        with pytest.raises(CheckpointError):
            load(path)
    (tmp_path / "x.txt").write_text("x")
    assert_refused(r"ends in \.pt, \.pth, \.bin, \.npz, \.safetensors", load, tmp_path / "x.txt")


def test_a_folder_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert_refused(r"cannot be read .*Permission denied", load, tmp_path)


def test_arrays_of_any_byte_order_and_layout(tmp_path: Path):
    values = np.arange(6, dtype=np.float64).reshape(2, 3)
    kinds = {
        "big": values.astype(">f8"),
        "columns": np.asfortranarray(values),
        "half": values.astype("f2"),
    }
    np.savez(
        tmp_path / "x.npz", empty=np.zeros((0, 3)), number=np.float32(2), config="text", **kinds
    )
    tensors = read_arrays(tmp_path / "x.npz")
    for name in kinds:
        assert torch.equal(tensors[name].double(), torch.from_numpy(values))
    assert tensors["empty"].shape == (0, 3)
    assert not {"config", "number"} & tensors.keys()  # settings
    assert tensor_files.read_file(tmp_path / "x.npz")[1] == {"config": "text", "number": 2.0}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickled_arrays_of_any_kind_and_layout(tmp_path: Path, protocol: int):
    arrays = {
        kind: np.arange(6).reshape(2, 3).astype(kind) for kind in (">f4", "<f8", "<i8", "|u1", "?")
    }
    arrays |= {f"{kind} turned": array.T for kind, array in arrays.items()} | {
        "none": np.zeros((0, 3))
    }
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(arrays | {"loss": np.float32(1)}, protocol))
    tensors = read_arrays(tmp_path / "x.pkl")
    assert list(tensors) == list(arrays)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_files, "MAX_ENTRIES", 3)
    save_file({str(i): torch.ones(1) for i in range(4)}, tmp_path / "x.safetensors")
    assert_refused("must hold at most 3 tensors, got 4", read_arrays, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("", "not a readable JSON file"),
        ("1" * 5000, "not a readable JSON file"),
        (" " * (2**22 + 1), "must be at most 4194304 bytes, got 4194305"),
    ],
    ids=["deep", "empty", "digits", "long"],
)
def test_hostile_json(tmp_path: Path, text: str, words: str):
    file = tmp_path / "config.json"
    file.write_text(text)
    for read in (read_json, lambda file: load(file.parent)):
        with little(), pytest.raises(CheckpointError, match=words):
            read(file)


@pytest.mark.parametrize("depth", [50, 500, 900, 990])
def test_a_native_config_nested_deeply(tmp_path: Path, depth: int):
    nested = "[" * depth + "]" * depth
    for field in ("task", "seed"):
        document = f'{{"format_version": 1, "step": 0, "experiment": {{"{field}": {nested}}}}}'
        (tmp_path / "config.json").write_text(document)
        with little(), pytest.raises(CheckpointError):
            load(tmp_path)


def test_messages_are_one_printable_line(tmp_path: Path):
    error = CheckpointError("a\nb\x1b[31m\u202ec\udc80\x00")
    assert str(error) == r"a\nb\x1b[31m\u202ec\udc80\x00"
    assert len(printable("x" * 10_000)) == 2000
    file = tmp_path / "a\nb\x1b<script>.pt"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        load(file)
    assert str(caught.value).isprintable()
    assert r"a\nb\x1b<script>.pt: must hold tensors" in str(caught.value)
