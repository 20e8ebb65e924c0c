"""Mutated checkpoint files: each ends in an answer or a CheckpointError, soon, and leaves nothing behind.

Run as `python -m tests.checkpoints.fuzz 20000 [SEED]` for so many files of each format.
"""

import json
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.loading import convert, load
from tests.checkpoints.foreign_files import attention_module, write_valid_files
from tests.models.test_layered_models import encoder, garg

SECONDS = 2.0
Hints = dict[str, object]


def write_originals(folder: Path) -> dict[str, tuple[Path, Hints]]:
    """A valid file of each format: the path to load, and what `load` needs."""
    torch.manual_seed(0)
    files = write_valid_files(folder)
    checkpoint = load(files["transformer-lens"][0])
    for target in ("native", "transformer-lens"):
        convert(checkpoint, target, folder / f"folder-{target}")
        files[f"folder-{target}"] = (folder / f"folder-{target}", {})
    convert(checkpoint, "npz", folder / "stated.npz")
    files["stated-arrays"] = (folder / "stated.npz", {})
    torch.save(garg().state_dict(), folder / "gpt2.pt")
    torch.save(encoder(6).state_dict(), folder / "encoder.pt")
    files["gpt2"] = (folder / "gpt2.pt", {"n_heads": 4})
    files["torch-encoder"] = (folder / "encoder.pt", {"n_heads": 2})
    shards = folder / "hugging-face"
    shards.mkdir()
    state = attention_module(0, width=4, n_heads=2, bias=True).state_dict()
    named = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(state)}
    for shard in set(named.values()):
        save_file({n: t for n, t in state.items() if named[n] == shard}, shards / shard)
    (shards / "config.json").write_text(json.dumps({"num_heads": 2}))
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    files["hugging-face"] = (shards, {})
    return files


def check(path: Path, hints: Hints) -> bool:
    """Whether the file gave an answer; anything else but a CheckpointError in time is raised.

    Raises:
        AssertionError: If it takes too long.
    """
    start, message = time.process_time(), ""
    try:
        checkpoint = load(path, **hints)  # type: ignore[arg-type]
        model, weights = checkpoint.config.model, checkpoint.weights
        assert weights.W_Q.shape[:2] == (model.n_layers, model.n_heads)
        if model.one_attention:
            assert weights.circuits.OV.shape[2] == checkpoint.config.task.d_y
        answered = True
    except CheckpointError as error:
        answered, message = False, str(error)
    assert message.isprintable(), message
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"{path} took {seconds:.1f} s"
    return answered


# Bytes.


def flipped(data: bytearray, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def truncated(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data)) :]


def spliced(data: bytearray, random: Random) -> None:
    """A chunk of the file over, into or out of another place."""
    length = min(len(data) - 1, random.choice((1, 4, 16, 64, 512)))
    there, here = random.randrange(len(data)), random.randrange(len(data))
    chunk = data[there : there + length]
    width = random.choice((0, len(chunk)))
    data[here : here + width] = random.choice((chunk, b"", bytes(len(chunk))))


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
    elif file.suffix in (".pkl", ".msgpack"):
        mutate_bytes(file, random)
    elif file.suffix == ".npz":
        with np.load(file) as arrays:
            found = dict(arrays)
        texts = {name: array for name, array in found.items() if array.dtype.kind == "U"}
        state = {
            name: torch.from_numpy(array) for name, array in found.items() if name not in texts
        }
        plain = {n: t for n, t in changed_state(state, random).items() if t.dtype != torch.bfloat16}
        plain = {name.strip("\n<>\x1b") or "x": tensor for name, tensor in plain.items()}
        np.savez(file, **texts, **{name: tensor.numpy() for name, tensor in plain.items()})
    elif file.suffix == ".safetensors":
        state = changed_state(load_file(file), random)
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, file)
    else:
        root = torch.load(file, weights_only=True)
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


MUTATIONS = (mutate_bytes, mutate_entries, mutate_tensors)


class Fuzzer:
    """Originals in memory, written afresh before each mutation."""

    def __init__(self, folder: Path) -> None:
        self.originals = write_originals(folder)
        self.bytes = {
            name: {
                f: f.read_bytes() for f in ([path] if path.is_file() else sorted(path.iterdir()))
            }
            for name, (path, _) in self.originals.items()
        }

    def run(self, name: str, count: int, seed: int) -> int:
        """Number of answers among so many mutated files of a format; checks each."""
        path, hints = self.originals[name]
        assert check(path, hints), f"{path} is not valid"
        files = self.bytes[name]
        answers = 0
        for number in range(count):
            random = Random(f"{name} {seed} {number}")
            target = random.choice([file for file in files if file.suffix != ".py"])
            random.choice(MUTATIONS)(target, random)
            try:
                answers += check(path, hints)
            except Exception as error:
                error.add_note(f"format {name}, seed {seed}, number {number}, file {target.name}")
                raise
            found = set(path.parent.iterdir()) if path.is_file() else set(path.iterdir())
            assert found >= set(files), f"{name} {number}: files are gone"
            target.write_bytes(files[target])
        return answers


def main(count: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        before = sorted(Path(folder).rglob("*"))
        for name in fuzzer.originals:
            start = time.process_time()
            answers = fuzzer.run(name, count, seed)
            seconds = time.process_time() - start
            print(
                f"{name}: {count} files, {answers} answers, the others refused, {seconds:.0f} s",
                flush=True,
            )
        assert sorted(Path(folder).rglob("*")) == before


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
