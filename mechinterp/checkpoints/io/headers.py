"""Headers of weight files, read before their numbers and without torch: sizes, names and shapes."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from mechinterp.checkpoints.io.files import CheckpointError, naming, readable, size_of
from mechinterp.config import ExperimentConfig
from mechinterp.config.model import tensor_shapes

LARGEST_FILE = 2**28
"""Largest size of a weight file in bytes; a GPT-2 with 12 layers of width 256 has 2**25 numbers."""
MAX_HEADER = 2**21
POINTER = b"version https://git-lfs.github.com/spec/"
STEP = "step"
"""Name of the tensor of steps in a file of snapshots."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns any error of a parser into a CheckpointError that names the file, and silences
    warnings."""
    plain = (".npz", ".npy", ".safetensors", ".msgpack", ".pkl", ".pickle")
    kind = file.suffix.lstrip(".") if file.suffix in plain else "PyTorch"
    with warnings.catch_warnings(), readable(file, kind, LARGEST_FILE, SafetensorError):
        warnings.simplefilter("ignore")
        with file.open("rb") as stream:
            if stream.read(len(POINTER)) == POINTER:
                what = f"a Git LFS pointer of {size_of(file)} bytes, not the weights"
                raise CheckpointError(f"{file}: {what}; run git lfs pull.")
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        except (OSError, SafetensorError):
            raise
        except Exception as error:
            # Parsers raise almost anything on random bytes: KeyError, OverflowError,
            # RecursionError.
            reason = type(error).__name__
            raise CheckpointError(f"{file}: not a readable {kind} file ({reason}).") from None


def require_header(file: Path) -> None:
    """Refuse a safetensors file with a header longer than the file or than MAX_HEADER."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    most = min(MAX_HEADER, max(file.stat().st_size - 8, 0))
    if not 0 < length <= most:
        reason = f"its header must have 1 to {most} bytes, it claims {length}"
        raise CheckpointError(f"not a readable safetensors file ({reason}).")


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file, by name.

    Raises:
        CheckpointError: If the file cannot be read.
    Example:
        >>> shapes_in(Path("checkpoints/softmax-h2-s0/model.safetensors"))["blocks.0.attn.W_Q"]
        (2, 6, 6)
    """
    with reading(file):
        require_header(file)
        with safe_open(file, framework="np") as stored:
            names = stored.keys()
            return {name: tuple(stored.get_slice(name).get_shape()) for name in names}


def require_finite(what: str, bad: int) -> None:
    """Refuse a tensor (or whatever `what` names) with `bad` entries that are NaN or infinite."""
    if bad:
        raise ValueError(f"{what} must hold finite numbers, got {bad} NaN or infinite.")


def require_finite_in(file: Path, names: Iterable[str]) -> None:
    """Refuse a safetensors file if one of these tensors has numbers that are not finite.

    Raises:
        CheckpointError: If one has; the message names the tensor.
    """
    with naming(file), opened(file, "np") as stored:
        for name in names:
            if stored.get_slice(name).get_dtype() in ("F16", "F32", "F64"):
                finite = np.isfinite(stored.get_tensor(name))
                require_finite(name, finite.size - int(finite.sum()))


def require_shapes(
    stored: Mapping[str, tuple[int, ...]], config: ExperimentConfig
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model of this config, all of which must be in the file.

    Raises:
        ValueError: If the file has another number of layers, or a tensor is missing or has another
            shape; the message names it.
    """
    n_layers = len({name.split(".")[1] for name in stored if name.startswith("blocks.")})
    if config.model.n_layers != n_layers:  # before names are made for all layers
        got = config.model.n_layers
        raise ValueError(f"model.n_layers must be that of the weights, {n_layers}, got {got}.")
    shapes = tensor_shapes(config.model, config.task.d_x, config.task.d_y)
    for name, shape in shapes.items():
        if name not in stored:
            raise ValueError(f"{name} is missing.")
        if stored[name] != shape:
            raise ValueError(f"{name} must have shape {shape}, got {stored[name]}.")
    return shapes


@contextmanager
def opened(file: Path, framework: str) -> Iterator[safe_open]:
    """A safetensors file of any size; its errors become CheckpointErrors."""
    with (
        readable(file, "safetensors", None, SafetensorError),
        safe_open(file, framework=framework) as stored,
    ):
        yield stored


def read_steps(file: Path) -> list[int]:
    """Steps in a file of snapshots.

    Raises:
        CheckpointError: If the file cannot be read, or its steps are not increasing from 0 or
            later.
    """
    with opened(file, "np") as stored:
        has_steps = STEP in stored.keys()  # noqa: SIM118 (it cannot be iterated over)
        whole = has_steps and stored.get_slice(STEP).get_dtype() == "I64"
        steps = stored.get_tensor(STEP) if whole else np.zeros(())
    if steps.ndim != 1:
        raise CheckpointError(f"{file}: {STEP} must hold whole numbers, one for each snapshot.")
    numbers = [int(step) for step in steps]
    if numbers != sorted({number for number in numbers if number >= 0}):
        raise CheckpointError(f"{file}: {STEP} must rise from 0 or later, got {numbers}.")
    return numbers
