"""Check that the prediction of a module is a function of the prompt alone.

Masks, probes and patches compare two runs of a module. They mean nothing if two runs differ by themselves: through
random numbers, through a state that stays between calls, or through the other prompts of the batch.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.foreign.readings.recorded import HALVES
from mechinterp.icl.prompts import Prompts

TRIAL_PROMPTS = 16
"""Number of prompts of the check; an even number."""
LIMIT, HALF_LIMIT = 1e-4, 2e-2
"""Largest difference between two runs that counts as rounding, over the standard deviation of the prediction: in single
or double precision, and in half precision."""
LEAST_SPREAD = 1e-2
"""Least standard deviation that counts, over the largest prediction: a constant is only known to its rounding."""
_TINY = 1e-300
Prediction = Float[Tensor, "batch d_y"]

RANDOM = """
between two runs on the same prompts, and not with one random state: it draws random numbers, as dropout that is always on
does; pass training=self.training to functional.dropout, and dropout_p=0.0 to scaled_dot_product_attention unless self.training
"""
STATE = """
between two runs on the same prompts, with one random state too: it keeps a state between calls, such as a counter, a
running mean, a cache or a random generator of its own; reset the state at the start of forward, or leave it out unless
self.training
"""
BATCH = """
from the run on the whole batch if the same prompts run {how}: a prediction depends on the other prompts of the batch;
take means within a prompt, quantise weights alone, give batch norms running statistics, and check which axis attention takes as positions
(batch_first=True for torch's, if prompts come first)
"""
"""Ends of the messages, by the cause."""


class RandomStates:
    """The shared random states of Python, numpy and torch, as they are when the object is made."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.torch = torch.get_rng_state()
        self.cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Set the states to what they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cards:
            torch.cuda.set_rng_state_all(self.cards)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Context after which the shared random states are as before."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()


def require_function_of_prompt(
    predict: Callable[[Prompts], Prediction], prompts: Prompts, dtype: torch.dtype
) -> None:
    """Refuse predictions that are not a function of the prompt.

    The prompts are predicted twice, in two halves, in another order, and once more. The random states are changed.

    Args:
        prompts: An even number of prompts, which differ.
        dtype: Precision in which the module computes.
    Raises:
        ValueError: If two predictions for a prompt differ by more than `LIMIT` (in half precision `HALF_LIMIT`) of the
            standard deviation over prompts. The message names the cause.
    """
    half = len(prompts) // 2
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(len(prompts), generator=generator, device="cpu")
    states = RandomStates()
    first, again = predict(prompts), predict(prompts)
    halves = torch.cat([predict(prompts[:half]), predict(prompts[half:])])
    mixed = torch.empty_like(first)
    mixed[order] = predict(prompts[order])
    last = predict(prompts)
    if off := max(difference(first, each, dtype) for each in (again, last)):
        states.restore()
        same = predict(prompts)
        raise ValueError(_line(off, STATE if difference(first, same, dtype) else RANDOM))
    for other, how in ((halves, "in two halves"), (mixed, "in another order")):
        if off := difference(first, other, dtype):
            raise ValueError(_line(off, BATCH.format(how=how)))


def difference(prediction: Prediction, other: Prediction, dtype: torch.dtype) -> float:
    """Largest difference in standard deviations of the prediction over prompts; 0 if it is rounding.

    Args:
        dtype: Precision in which the predictions were computed.
    Example:
        >>> one = torch.tensor([[-1.0], [1.0]])
        >>> difference(one, one + 1e-6, one.dtype), round(difference(one, one + 0.5, one.dtype), 3)
        (0.0, 0.354)
    """
    off = deviation(prediction, other)
    return off if off > (HALF_LIMIT if dtype in HALVES else LIMIT) else 0.0


def deviation(prediction: Prediction, other: Prediction) -> float:
    """Largest difference between predictions, in standard deviations of the first over prompts."""
    prediction, other = prediction.double(), other.double()
    if not torch.equal(prediction.isfinite(), other.isfinite()):
        return float("inf")
    least = LEAST_SPREAD * prediction.abs().amax(0)
    spread = torch.maximum(prediction.std(0), least).clamp_min(_TINY)
    return ((other - prediction).abs() / spread).nan_to_num(0, 0, 0).max().item()


def _line(off: float, cause: str) -> str:
    return (
        f"module must be a function of the prompt, but its prediction differs by {off:.2g} of its standard deviation "
        f"{' '.join(cause.split())}."
    )
