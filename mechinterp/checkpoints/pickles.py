"""What a pickle asks for, found by reading its opcodes and running none.

torch.load with weights_only=True runs no code of a file, but some of what it allows makes gigabytes out of
a few bytes, and millions of opcodes take it minutes.
"""

import pickletools
import re
from pathlib import Path

from mechinterp.checkpoints.errors import CheckpointError

MAX_BYTES = 12_000_000
"""Size of a pickle; the losses of 500,000 steps take 4.5 million bytes."""
MAX_STEPS = 300_000
"""Number of opcodes besides floats."""
KINDS = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")
HARMLESS = {
    *("collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.Size", "torch.device"),
    *("torch._utils._rebuild_parameter", "torch.ComplexFloatStorage", "torch.ComplexDoubleStorage"),
    *(f"torch.{kind}Storage" for kind in KINDS),
    *(f"torch.{kind}" for kind in ("float16", "float32", "float64", "bfloat16", "int64")),
}
"""What tensors and plain values ask for."""
CODES = {ord(op.code): op for op in pickletools.opcodes}
SIZES = {
    code: 1 + (op.arg.n if op.arg else 0)
    for code, op in CODES.items()
    if op.arg is None or op.arg.n >= 0
}
"""Bytes that an opcode takes with its argument, where that is always the same."""
WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
FLOATS = re.compile(rb"(?:G.{8})+", re.DOTALL)
STOP, GLOBAL = ord("."), ord("c")


def require_harmless(pickled: bytes, file: Path) -> None:
    """Refuse a pickle that is too long, or asks for anything but tensors and plain values.

    Raises:
        CheckpointError: If it does, or is no pickle.
    """
    if len(pickled) > MAX_BYTES:
        raise _refusal(file, f"a pickle of {len(pickled)} bytes")
    at = steps = 0
    while at < len(pickled) and pickled[at] != STOP:
        floats = FLOATS.match(pickled, at)
        if floats is not None:
            at = floats.end()
            continue
        steps += 1
        if steps > MAX_STEPS:
            raise _refusal(file, f"a pickle of more than {MAX_STEPS} steps")
        size = SIZES.get(pickled[at])
        if size is not None:
            at += size
        elif pickled[at] == GLOBAL:
            asked, at = _lines(pickled, at + 1, 2)
            if asked not in HARMLESS:
                raise _refusal(file, f"one that asks for {asked}")
        else:
            at = _behind(pickled, at, file)


def _behind(pickled: bytes, at: int, file: Path) -> int:
    """Where the opcode at a place ends with its argument, whose length the file says."""
    op = CODES.get(pickled[at])
    if op is None or op.arg is None:
        raise _refusal(file, f"no pickle: {pickled[at : at + 1]!r}")
    at += 1
    if op.arg.n == pickletools.UP_TO_NEWLINE:
        return _lines(pickled, at, 2 if op.name == "INST" else 1)[1]
    width = WIDTHS[op.arg.n]
    return at + width + int.from_bytes(pickled[at : at + width], "little")


def _lines(pickled: bytes, at: int, count: int) -> tuple[str, int]:
    """So many lines, joined by dots, and where they end."""
    found = []
    for _ in range(count):
        end = pickled.find(b"\n", at)
        end = len(pickled) if end < 0 else end
        found.append(pickled[at:end].decode(errors="replace"))
        at = end + 1
    return ".".join(found), at


def _refusal(file: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: must hold tensors that can be read without running code, got {got}."
    )
