"""Mutations of files: of their bytes, of the entries of archives, of tensors, tables, JSON and pickles.

Each takes a file and a random generator and writes the file anew, as a function of the two.
"""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.training.state import _checksum
from tests.checkpoints.test_pickles import DEEP, DOUBLED, HOSTILE, in_state

# Bytes.


def flipped(data: bytearray, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def truncated(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data)) :]


def spliced(data: bytearray, random: Random) -> None:
    """A chunk of the file over, into or out of another place."""
    length = min(len(data) - 1, random.choice((1, 4, 16, 64, 512)))
    source, target = random.randrange(len(data)), random.randrange(len(data))
    chunk = data[source : source + length]
    width = random.choice((0, len(chunk)))
    data[target : target + width] = random.choice((chunk, b"", bytes(len(chunk))))


def edited(data: bytearray, random: Random) -> None:
    """A number, such as a length in a header, becomes another."""
    if data[:1] in (b"{", b"[") or random.random() < 0.3:
        digits = [i for i, c in enumerate(data) if 48 <= c < 58]
        if digits:
            data[random.choice(digits)] = random.choice(b'0123456789-e"[')
            return
    width = random.choice((1, 2, 4, 8))
    value = random.choice((0, 1, 2**7, 2**15, 2**31, 2**60, 2**63, 2**64 - 1)) % 2 ** (8 * width)
    at = random.choice((0, random.randrange(len(data))))
    data[at : at + width] = value.to_bytes(width, "little")


BYTES = (flipped, truncated, spliced, edited)


def mutate_bytes(file: Path, random: Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(random.choice((1, 1, 2, 4))):
        if len(data) > 1:
            random.choice(BYTES)(data, random)
    file.write_bytes(data)


# Entries of an archive, as a careful hand would leave them: lengths and checksums are right.


def mutate_entries(file: Path, random: Random) -> None:
    if not zipfile.is_zipfile(file):
        mutate_bytes(file, random)
        return
    with zipfile.ZipFile(file) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    at = random.randrange(len(entries))
    name, data = entries[at]
    kind = random.randrange(5)
    if kind == 0:
        del entries[at]
    elif kind == 1:
        entries[at] = (
            random.choice((name.upper(), name + "x", "../" + name, "archive/data/9")),
            data,
        )
    elif kind == 2:
        entries.append((f"{name}{random.randrange(3)}", data))
    else:
        # The pickle and the headers of arrays are where structure lies.
        at = max(
            range(len(entries)), key=lambda i: entries[i][0].endswith(".pkl") * 99 + random.random()
        )
        changed = bytearray(entries[at][1])
        for _ in range(random.choice((1, 2, 3))):
            if len(changed) > 1:
                random.choice(BYTES)(changed, random)
        entries[at] = (entries[at][0], bytes(changed))
    with zipfile.ZipFile(
        file, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, data in entries:
            if name not in archive.namelist():
                archive.writestr(name, data)


# Tensors.


def changed_tensor(tensor: Tensor, random: Random) -> Tensor:
    kinds: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda t: t * random.choice((float("nan"), float("inf"), 0.0, 1e30, -1.0, 1e-30)),
        lambda t: t.reshape(-1),
        lambda t: t[..., :-1] if t.ndim and t.shape[-1] else t,
        lambda t: t[:0] if t.ndim else t,
        lambda t: t[None],
        lambda t: t.mT.contiguous() if t.ndim > 1 else t,
        lambda t: torch.cat([t, t]) if t.ndim else t,
        lambda t: t.to(random.choice((torch.float16, torch.bfloat16, torch.float64, torch.int32))),
        lambda t: t.to(random.choice((torch.bool, torch.complex64, torch.uint8))),
        lambda t: torch.randn(random.choice(((), (1,), (4, 4), (2, 4, 4), (1, 1, 1, 1)))),
    )  # fmt: skip
    return random.choice(kinds)(tensor)


def changed_state(state: dict[str, Tensor], random: Random) -> dict[str, Tensor]:
    state = dict(state)
    for _ in range(random.choice((1, 1, 2, 3))):
        if not state:
            break
        name = random.choice(list(state))
        kind = random.randrange(6)
        if kind == 0:
            del state[name]
        elif kind == 1:
            state[random.choice((name + "x", "module." + name, "W_Q", "\n<b>\x1b", ""))] = (
                state.pop(name)
            )
        elif kind == 2:
            state[random.choice(list(state))] = state[name]
        else:
            state[name] = changed_tensor(state[name], random)
    return state


def mutate_tensors(file: Path, random: Random) -> None:
    if file.suffix == ".json":
        mutate_json(file, random)
    elif file.suffix == ".parquet":
        mutate_table(file, random)
    elif file.stem.startswith("training-"):
        mutate_state(file, random)
    elif file.suffix in (".pickle", ".msgpack"):
        mutate_bytes(file, random)
    elif file.suffix == ".npz":
        with np.load(file) as stored:
            arrays = dict(stored)
        texts = {name: array for name, array in arrays.items() if array.dtype.kind == "U"}
        state = {n: torch.from_numpy(array) for n, array in arrays.items() if n not in texts}
        plain = {n: t for n, t in changed_state(state, random).items() if t.dtype != torch.bfloat16}
        plain = {name.strip("\n<>\x1b") or "x": tensor for name, tensor in plain.items()}
        np.savez(file, **texts, **{name: tensor.numpy() for name, tensor in plain.items()})
    elif file.suffix == ".safetensors":
        state = changed_state(load_file(file), random)
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, file)
    else:
        root = torch.load(file, weights_only=False)  # ours, with all that a run keeps
        inner = root.get("model")
        state = changed_state(inner if isinstance(inner, dict) else root, random)
        if state and random.random() < 0.1:
            name = random.choice(list(state))
            state[name] = torch.ones(1).expand(*random.choice(((2**40,), (2, 4, 4), (8, 4))))
        torch.save(root | {"model": state} if isinstance(inner, dict) else state, file)


def mutate_json(file: Path, random: Random) -> None:
    document = json.loads(file.read_text())
    inner = document
    while isinstance(inner, dict) and inner:
        key = random.choice(list(inner))
        if not isinstance(inner[key], dict) or random.random() < 0.3:
            values = (None, -1, 0, 1, 3, 2**70, 1e400, "x", [], {}, True, 0.5, [[1]], "a\nb")
            if random.random() < 0.2:
                del inner[key]
            else:
                inner[key] = random.choice(values)
            break
        inner = inner[key]
    file.write_text(json.dumps(document))


def mutate_table(file: Path, random: Random) -> None:
    """Columns and rows become others; the file stays a table."""
    frame = pd.read_parquet(file)
    name = random.choice(list(frame))
    values = (None, float("nan"), float("inf"), -1, 2**62, 1e300, "x", True, [1, 2], b"\x1b[2J")
    kinds: tuple[Callable[[], pd.DataFrame], ...] = (
        lambda: frame.drop(columns=name),
        lambda: frame.rename(columns={name: random.choice(("x", "\n<b>\x1b", "step", ""))}),
        lambda: frame.assign(**{name: random.choice(values) if random.random() < 0.5 else 7}),
        lambda: frame.assign(**{name: frame[name].astype(random.choice(("str", "float16", "int8", "object")))}),
        lambda: frame.iloc[:0],
        lambda: frame.iloc[::-1],
        lambda: pd.concat([frame] * random.choice((2, 500))),
        lambda: frame.assign(**{f"c{i}": 1.0 for i in range(random.choice((1, 100)))}),
        lambda: frame.set_index(name),
    )  # fmt: skip
    try:
        made = random.choice(kinds)()
        codec = random.choice(("snappy", "snappy", "gzip", "zstd"))
        made.to_parquet(file, compression=codec, row_group_size=random.choice((None, 1)))
    except (ValueError, TypeError, OverflowError, LookupError, pd.errors.IntCastingNaNError):
        mutate_bytes(file, random)  # what has no such table


def mutate_state(file: Path, random: Random) -> None:
    """A state of a training with other tensors or settings, half of the time with the checksum they should have."""
    with safe_open(file, framework="pt") as stored:
        metadata = dict(stored.metadata())
    state = load_file(file)
    if random.random() < 0.5:
        state = changed_state(state, random)
    else:
        name = random.choice(list(metadata))
        texts = ("-1", "999999999", "x", "{}", "null", "[" * 5000, metadata[name] + " ", "1e9")
        metadata[name] = random.choice(texts)
        if random.random() < 0.5 and name == "models":
            other = file.with_suffix(".json")
            other.write_text(metadata[name] if metadata[name].startswith("{") else "{}")
            mutate_json(other, random)
            metadata[name] = other.read_text()
            other.unlink()
    state = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    if random.random() < 0.5 and {"step", "models"} <= metadata.keys():
        metadata["checksum"] = _checksum(metadata, state)
    save_file(state, file, metadata)


# Pickles.

WORDS = (
    *(b"}", b")", b"]", b"N", b"\x88", b"(", b"0", b"1", b"2", b"\x8f", b"K\x05", b"X\x01\0\0\0W"),
    *(b"\x85", b"\x86", b"t", b"s", b"u", b"a", b"e", b"b", b"R", b"\x81", b"\x92", b"\x93", b"Q"),
    *(b"q\0", b"h\0", b"\x94", b"\x91", b"\x90", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 8),
    *(b"cos\nsystem\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
    *(b"G" + b"\x7f" * 8, b"X\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8, DOUBLED, DEEP[:2000]),
)


def mutate_pickle(file: Path, random: Random) -> None:
    """A torch file whose pickle is a hostile one or a random programme; any other file gets other bytes."""
    if file.suffix == ".pickle":
        file.write_bytes(_hostile(random))
        return
    if not zipfile.is_zipfile(file) or file.suffix == ".npz":
        mutate_bytes(file, random)
        return
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in entries if name.endswith("/data.pkl"))
    entries[name] = _hostile(random)
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)


def _hostile(random: Random) -> bytes:
    kind = random.randrange(3)
    words = b"".join(random.choices(WORDS, k=random.choice((3, 30, 300))))
    known = random.choice(list(HOSTILE.values()))[0]
    return b"\x80\x02" + (known, words, in_state(words))[kind] + b"."


MUTATIONS = (mutate_bytes, mutate_entries, mutate_tensors, mutate_pickle)
