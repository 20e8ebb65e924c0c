"""Standard normal float32 numbers with the bits of `torch.Tensor.normal_`, in a third of its time.

torch takes uniform numbers one at a time from the Mersenne Twister, and turns 16 at a time into normal ones by the
Box-Muller transform. Here all 624 numbers of a state are made at once. The bits of torch's transform depend on its version
and on the processor. So the compiled transform is compared with torch's own on the first call, and where they differ
torch draws.

Importing this module compiles it, or loads the compiled code of an earlier import.
"""

# mypy: no-check-untyped-defs
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from mechinterp.training.lanes import compiled

STATE_WORDS = 624
"""Words of a state of the Mersenne Twister."""
GROUP = 16
"""Numbers that torch transforms together: the first half are radii, the second half angles."""
_MIDDLE = 397
"""Distance between the words of a state that are combined."""
_BATCH = 32
"""Groups that are transformed together."""
_TRIAL = 2**16 + 5
"""Numbers that are compared with torch's; not a multiple of a group, so that its last numbers are drawn twice."""
_LEFT, _NEXT, _FIRST_WORD = 2, 4, 6
"""Places in torch's state of a generator, in units of 4 bytes: words left, next word, first word (each takes 8 bytes)."""

_UPPER, _LOWER, _TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_f = np.float32


def normal_numbers(size: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in float32, as `torch.empty(size).normal_(generator=generator)` has them.

    The generator is left in the same state, too.

    Args:
        generator: Random generator on the CPU.
    Example:
        >>> first, second = (torch.Generator().manual_seed(3) for _ in range(2))
        >>> torch.equal(normal_numbers(100, first), torch.empty(100).normal_(generator=second))
        True
    """
    if size < GROUP or not _has_the_bits_of_torch():
        return torch.empty(size, dtype=torch.float32, device="cpu").normal_(generator=generator)
    return _compiled_numbers(size, generator)


def _compiled_numbers(size: int, generator: torch.Generator) -> Tensor:
    numbers = torch.empty(size, dtype=torch.float32, device="cpu")
    state = generator.get_state()
    words = state.view(torch.int32).numpy().view(np.uint32)
    fill_normal(numbers.numpy(), words)
    generator.set_state(state)
    return numbers


@cache
def _has_the_bits_of_torch() -> bool:
    """True if numbers and the state after them are the same as torch's on a trial."""
    ours, torchs = (torch.Generator(device="cpu").manual_seed(0) for _ in range(2))
    expected = torch.empty(_TRIAL, dtype=torch.float32, device="cpu").normal_(generator=torchs)
    if len(ours.get_state()) < 4 * (_FIRST_WORD + 2 * STATE_WORDS):
        return False
    same = torch.equal(_compiled_numbers(_TRIAL, ours), expected)
    return same and torch.equal(ours.get_state(), torchs.get_state())


@intrinsic
def _fused(_context, a, b, c):
    """a * b + c, rounded once."""

    def code(_context, builder, _signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def _bits(_context, number):
    def code(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), code


@intrinsic
def _number(_context, bits):
    def code(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), code


@compiled(exact=True)
def logarithm(x):
    """log(x) for a normal x > 0, in the order of operations of torch."""
    bits, one = _bits(x), _f(1)
    exponent = _f((bits >> np.int32(23)) - np.int32(127)) + one
    x = _number((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000))
    # x in [1/2, 1) becomes x - 1, or 2x - 1 below the root of 1/2.
    small = x < _f(0.707106781186547524)
    again = x if small else _f(0)
    exponent = exponent - (one if small else _f(0))
    x = (x - one) + again
    # Minimax polynomial of the Cephes library, logf.
    y = _fused(_f(7.0376836292e-2), x, _f(-1.1514610310e-1))
    y = _fused(y, x, _f(1.1676998740e-1))
    y = _fused(y, x, _f(-1.2420140846e-1))
    y = _fused(y, x, _f(1.4249322787e-1))
    y = _fused(y, x, _f(-1.6668057665e-1))
    y = _fused(y, x, _f(2.0000714765e-1))
    y = _fused(y, x, _f(-2.4999993993e-1))
    y = _fused(y, x, _f(3.3333331174e-1))
    square = x * x
    y = _fused(y * x, square, exponent * _f(-2.12194440e-4))
    y = _fused(square, _f(-0.5), y)
    return _fused(exponent, _f(0.693359375), x + y)


@compiled(exact=True)
def sine_and_cosine(x):
    """sin(x) and cos(x) for 0 <= x <= 2 pi, in the order of operations of torch."""
    octant = (np.int32(x * _f(1.27323954473516)) + np.int32(1)) & np.int32(~1)
    # The octant times pi/4 is subtracted in three parts, of which the first two are short.
    eighths = _f(octant)
    x = _fused(eighths, _f(-0.78515625), x)
    x = _fused(eighths, _f(-2.4187564849853515625e-4), x)
    x = _fused(eighths, _f(-3.77489497744594108e-8), x)
    # Minimax polynomials of the Cephes library, sinf and cosf.
    z = x * x
    cosine = _fused(_f(2.443315711809948e-5), z, _f(-1.388731625493765e-3))
    cosine = _fused(cosine, z, _f(4.166664568298827e-2)) * z
    cosine = _fused(cosine, z, -(z * _f(0.5))) + _f(1)
    sine = _fused(_f(-1.9515295891e-4), z, _f(8.3321608736e-3))
    sine = _fused(_fused(sine, z, _f(-1.6666654611e-1)) * z, x, x)
    sine_flips = (octant & np.int32(4)) << np.int32(29)
    cosine_flips = (~(octant - np.int32(2)) & np.int32(4)) << np.int32(29)
    straight = (octant & np.int32(2)) == 0
    first, second = (sine, cosine) if straight else (cosine, sine)
    return _number(_bits(first) ^ sine_flips), _number(_bits(second) ^ cosine_flips)


@compiled(exact=True)
def transform(radii, angles):
    """Box-Muller transform of uniform numbers, in place."""
    for k in range(radii.size):
        radius = np.sqrt(_f(-2) * logarithm(_f(1) - radii[k]))
        sine, cosine = sine_and_cosine(_f(6.283185307179586) * angles[k])
        # torch multiplies by 1 and adds 0, which makes a -0 a 0.
        radii[k] = radius * cosine + _f(0)
        angles[k] = radius * sine + _f(0)


@compiled(exact=True)
def transform_groups(numbers):
    """Normal numbers from uniform ones in groups, in place."""
    half, n_groups = GROUP // 2, numbers.size // GROUP
    radii, angles = np.empty(half * _BATCH, _f), np.empty(half * _BATCH, _f)
    for first in range(0, n_groups, _BATCH):
        n = min(_BATCH, n_groups - first)
        for group in range(n):
            start = GROUP * (first + group)
            for j in range(half):
                radii[half * group + j] = numbers[start + j]
                angles[half * group + j] = numbers[start + half + j]
        transform(radii[: half * n], angles[: half * n])
        for group in range(n):
            start = GROUP * (first + group)
            for j in range(half):
                numbers[start + j] = radii[half * group + j]
                numbers[start + half + j] = angles[half * group + j]


@compiled(exact=True)
def twisted(word, following):
    """Highest bit of a word and the other bits of the following one, through the matrix of the Mersenne Twister."""
    mixed = ((word & _UPPER) | (following & _LOWER)) >> np.uint32(1)
    return mixed ^ ((np.uint32(0) - (following & np.uint32(1))) & _TWIST)


@compiled(exact=True)
def renew(state):
    """Next state of the Mersenne Twister, in place."""
    # In pieces that read no word they write, so that many words are made at once.
    rest = STATE_WORDS - _MIDDLE
    for k in range(rest):
        state[k] = state[k + _MIDDLE] ^ twisted(state[k], state[k + 1])
    for k in range(rest, 2 * rest):
        state[k] = state[k - rest] ^ twisted(state[k], state[k + 1])
    for k in range(2 * rest, STATE_WORDS - 1):
        state[k] = state[k - rest] ^ twisted(state[k], state[k + 1])
    state[STATE_WORDS - 1] = state[_MIDDLE - 1] ^ twisted(state[STATE_WORDS - 1], state[0])


@compiled(exact=True)
def set_uniform(words, numbers):
    """Uniform numbers in [0, 1) of words of a state: their last 24 bits."""
    for k in range(numbers.size):
        y = words[k]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        y ^= y >> np.uint32(18)
        numbers[k] = _f(np.int32(y & np.uint32(0xFFFFFF))) * _f(2.0**-24)


@compiled(exact=True)
def fill_uniform(numbers, state, at):
    """Fill with uniform numbers from word `at` of the state on; returns the next word."""
    done = 0
    while done < numbers.size:
        if at == STATE_WORDS:
            renew(state)
            at = 0
        n = min(STATE_WORDS - at, numbers.size - done)
        set_uniform(state[at : at + n], numbers[done : done + n])
        at, done = at + n, done + n
    return at


@compiled(types.void(types.float32[::1], types.uint32[::1]), exact=True)
def fill_normal(numbers, generator):
    """Fill with normal numbers from a state of torch's generator, which is renewed; at least one group."""
    state = generator[_FIRST_WORD : _FIRST_WORD + 2 * STATE_WORDS : 2].copy()
    # A fresh generator has one word left and next word 0; it is renewed before the first number.
    at = STATE_WORDS if generator[_LEFT] == 1 else np.int64(generator[_NEXT])
    at = fill_uniform(numbers, state, at)
    transform_groups(numbers)
    if numbers.size % GROUP:
        # torch draws the last group again.
        last = numbers[numbers.size - GROUP :]
        at = fill_uniform(last, state, at)
        transform_groups(last)
    for k in range(STATE_WORDS):
        generator[_FIRST_WORD + 2 * k] = state[k]
    generator[_LEFT], generator[_NEXT] = np.uint32(STATE_WORDS + 1 - at), np.uint32(at)
