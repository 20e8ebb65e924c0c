"""Vector type of the compiled steps: one float32 for each prompt of a block.

numba has no such type. This module defines it, with arithmetic, loads, stores and the exponential.
"""

# mypy: no-check-untyped-defs
import operator
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from inspect import unwrap
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import config
from numba.core.typeconv import Conversion
from numba.core.typing.templates import ConcreteTemplate, Signature, infer_global, signature
from numba.extending import intrinsic, lower_builtin, lower_cast, models, register_model
from torch import Tensor

from mechinterp.config import SCORES
from mechinterp.training.batches import LANES

_CLOSE = 1e-3
"""Largest difference between the compiled step and the tensor operations, relative to the largest entry."""

VECTOR = ir.VectorType(ir.FloatType(), LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_LINE = 64
"""Bytes of a cache line. A vector that crosses two lines takes twice the time to load."""
# a * b + c may be rounded once; nothing else is reordered, and NaN stays NaN.
CONTRACT = ("contract",)


class LanesType(types.Type):
    """One float32 for each prompt of a block, kept in registers."""

    def can_convert_from(self, _context: object, other: types.Type) -> Conversion | None:
        return Conversion.safe if isinstance(other, types.Float) else None


lanes = LanesType("lanes")


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):
    """Data model of lanes: one LLVM vector."""

    def __init__(self, manager, kind):
        super().__init__(manager, kind, VECTOR)


@lower_cast(types.Float, LanesType)
def _broadcast(_context, builder, kind, _to, value):
    if kind.bitwidth == 64:
        value = builder.fptrunc(value, ir.FloatType())
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTEGERS, [0] * LANES))


def _define(operation, instruction: str) -> None:
    """Define an operator between lanes, or between lanes and a number."""

    @infer_global(operation)
    class Template(ConcreteTemplate):
        cases = [signature(lanes, lanes, lanes)]

    @lower_builtin(operation, lanes, lanes)
    def lower(_context, builder, _signature, arguments):
        return getattr(builder, instruction)(*arguments, flags=CONTRACT)


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")
_define(operator.truediv, "fdiv")


def _pointer(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, array).data
    first = builder.mul(index, index.type(LANES))
    return builder.bitcast(builder.gep(data, [first]), VECTOR.as_pointer())


@intrinsic
def load_lanes(_context, array, index):
    """Lanes at position `index` of a flat array."""

    def code(context, builder, signature, arguments):
        return builder.load(_pointer(context, builder, signature.args[0], *arguments), align=4)

    return lanes(array, types.intp), code


@intrinsic
def store_lanes(_context, array, index, value):
    """Store lanes at position `index` of a flat array."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), code


@intrinsic
def borrowed(_context, array):
    """The same array without a count of references, which its rows would raise and lower; another array must own the memory."""

    def code(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        return view._getvalue()

    return array(array), code


@intrinsic
def fill(_context, number):
    """Lanes that all contain the same number."""
    return lanes(lanes), lambda context, builder, signature, arguments: arguments[0]


def _selecting(comparison: str):
    """Function of two lanes that returns the first where the comparison holds, else (also for NaN) the second."""

    @intrinsic
    def select(_context, a, b):
        def code(context, builder, signature, arguments):
            return builder.select(builder.fcmp_ordered(comparison, *arguments), *arguments)

        return lanes(lanes, lanes), code

    return select


larger, smaller = _selecting(">"), _selecting("<")


@intrinsic
def power_of_two(_context, shifted):
    """2^n, computed from n + 1.5 * 2^23, whose last bits are those of the integer n."""

    def code(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], INTEGERS)
        one = ir.Constant(INTEGERS, [127 - 0x4B400000] * LANES)
        exponent = builder.shl(builder.add(bits, one), ir.Constant(INTEGERS, [23] * LANES))
        return builder.bitcast(exponent, VECTOR)

    return lanes(lanes), code


@intrinsic
def total(_context, value):
    """Sum over the lanes in a fixed order: halves are added to halves."""

    def code(context, builder, signature, arguments):
        value, width = arguments[0], LANES
        while width > 1:
            width //= 2
            kind = ir.VectorType(ir.IntType(32), width)
            low, high = (
                builder.shuffle_vector(value, value, ir.Constant(kind, list(range(a, a + width))))
                for a in (0, width)
            )
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.IntType(32)(0))

    return types.float32(lanes), code


def code_digest() -> str:
    """Digest of all code of training, and of the list of scores: compiled code of any other digest is not used."""
    folder = Path(__file__).parent
    texts = (file.read_bytes() for file in sorted(folder.rglob("*.py")))
    return sha256(b"".join(texts) + repr(SCORES).encode()).hexdigest()[:16]


@cache
def cache_folder() -> Path | None:
    """Writable folder for compiled code of the present digest; None if there is none.

    numba itself looks at the file of the entry function alone, so that a change in another file would leave the old code.
    """
    own = [Path(__file__).parent / "__pycache__", Path.home() / ".cache" / "mechinterp"]
    given = vars(config)["CACHE_DIR"]
    for parent in [Path(given)] if given else own:
        folder = parent / f"kernels-{code_digest()}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                return folder
    return None


def compiled(signature: Signature | None = None, *, exact: bool = False):
    """numba.njit. A function with a signature is compiled at once and cached on disk if that is writable.

    Args:
        exact: True: a * b + c is rounded twice, as written.
    """
    settings = {"fastmath": False if exact else {*CONTRACT}, "error_model": "numpy"}

    def decorate(function):
        function = unwrap(function)  # the test run wraps functions to check their types
        folder, before = cache_folder() if signature else None, config.CACHE_DIR
        if folder is None:
            return njit(signature, **settings)(function)
        config.CACHE_DIR = str(folder)
        try:
            return njit(signature, cache=True, **settings)(function)
        finally:
            config.CACHE_DIR = before

    return decorate


@compiled()
def aligned(size):
    """Uninitialised float32 array that begins with a cache line."""
    raw = np.empty(size + _LINE // 4, np.float32)
    first = (-(raw.ctypes.data // 4)) % (_LINE // 4)
    return raw[first : first + size]


@compiled()
def aligned_zeros(rows, size):
    """Float32 zeros [rows, size * LANES] that begin with a cache line."""
    array = aligned(rows * size * LANES)
    array[:] = 0
    return array.reshape(rows, size * LANES)


def require_close(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Refuse a compiled step that differs from the tensor operations.

    Raises:
        ValueError: If a tensor differs by more than 1e-3 of its largest entry.
    """
    for one, other in zip(found, expected, strict=True):
        error, largest = (one.double() - other.double()).abs().max(), other.abs().max()
        if not error <= _CLOSE * largest:
            raise ValueError(
                f"the compiled step of {name} must agree with the tensor operations to {_CLOSE}, got an error of "
                f"{error:.3g} of {largest:.3g}: delete its folder, {cache_folder()}, and start again."
            )


@compiled()
def exponential(x):
    """exp(x) with relative error 2e-7; x is clamped to [-87, 88], and NaN stays NaN."""
    x = larger(fill(-87.0), smaller(fill(88.0), x))
    # exp(x) = 2^n exp(r) with |r| <= log(2)/2: adding 1.5 * 2^23 rounds to an integer, and log(2) is
    # subtracted in two parts, the first of which has so few digits that n times it is exact.
    shifted = x * 1.4426950408889634 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    # Minimax polynomial of the Cephes library, expf.
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    return ((p * r) * r + (r + 1.0)) * power_of_two(shifted)
