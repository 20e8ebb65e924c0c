"""Random generators, and task vectors drawn by them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

STREAMS = ("init", "train", "eval", "pool")
POOL_BLOCK = 1024
"""Number of task vectors of a pool that are drawn at once."""


@runtime_checkable
class VectorLaw(Protocol):
    """Fields of a task that decide its task vectors."""

    @property
    def d_x(self) -> int: ...
    @property
    def d_y(self) -> int: ...
    @property
    def shared_beta(self) -> bool: ...
    @property
    def sparsity(self) -> int | None: ...
    @property
    def nonzeros(self) -> str: ...
    @property
    def supports(self) -> tuple[tuple[int, ...], ...] | None: ...
    @property
    def n_tasks(self) -> int | None: ...
    @property
    def task_seed(self) -> int: ...
    @property
    def beta_variance(self) -> float: ...


def generator_for(
    seed: int, stream: str, step: int, *, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Random generator whose state depends on (seed, stream, step) only.

    Raises:
        ValueError: If the stream is not one of "init", "train", "eval", "pool", or the seed is not an integer >= 0.
    Example:
        >>> first, again = (torch.rand(1, generator=generator_for(0, "train", 7)) for _ in range(2))
        >>> torch.equal(first, again)
        True
    """
    if stream not in STREAMS:
        raise ValueError(f"stream must be one of {', '.join(STREAMS)}, got {stream!r}.")
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}.")
    entropy = np.random.SeedSequence([seed, STREAMS.index(stream), step])
    state = int(entropy.generate_state(1, np.uint64)[0])
    return torch.Generator(device=device).manual_seed(state)


def support_mask(supports: Sequence[Sequence[int]], d_x: int) -> Float[Tensor, "d_x d_y"]:
    """Mask [coordinate, response]: 1 if the response depends on the coordinate, else 0.

    Example:
        >>> support_mask(((0, 1), (1,)), 2)
        tensor([[1., 0.],
                [1., 1.]])
    """
    mask = torch.zeros(d_x, len(supports), dtype=torch.float32, device="cpu")
    for response, support in enumerate(supports):
        mask[list(support), response] = 1
    return mask


def random_support(
    like: Float[Tensor, "batch d_x d_y"], sparsity: int, *, generator: torch.Generator
) -> Float[Tensor, "batch d_x d_y"]:
    """Mask with 1 at `sparsity` random coordinates of each task vector; all choices are equally
    likely.

    Example:
        >>> random_support(torch.zeros(2, 5, 1), 3, generator=generator_for(0, "eval", 0)).sum(1)
        tensor([[3.],
                [3.]])
    """
    # Drawn last, and in sparse tasks only, so that other tasks keep their random numbers.
    order = torch.rand(like.shape, generator=generator, dtype=torch.float32, device=like.device)
    live = order.topk(sparsity, dim=1).indices
    return torch.zeros_like(like).scatter_(1, live, 1.0)


def task_vectors(
    task: VectorLaw, normal: Float[Tensor, "batch d_x vector"], generator: torch.Generator
) -> Float[Tensor, "batch d_x d_y"]:
    """Task vectors from standard normal numbers; one vector for all responses, or one for each."""
    beta = normal
    if task.sparsity is not None:
        if task.nonzeros == "signs":
            beta = beta.sign()
        beta = beta * random_support(beta, task.sparsity, generator=generator)
    beta = beta * task.beta_variance**0.5
    beta = beta.expand(-1, -1, task.d_y)
    if task.supports is not None:
        beta = beta * support_mask(task.supports, task.d_x).to(beta)
    return beta


@lru_cache(maxsize=8)
def pool_of(task: VectorLaw) -> Float[Tensor, "task d_x d_y"]:
    """Task vectors of a pool, float64 on the CPU; drawn in blocks, so that a smaller pool is the beginning of a larger one."""
    assert task.n_tasks is not None
    n_vectors = 1 if task.shared_beta else task.d_y
    blocks = []
    for block in range(-(-task.n_tasks // POOL_BLOCK)):
        generator = generator_for(task.task_seed, "pool", block)
        shape = (POOL_BLOCK, task.d_x, n_vectors)
        normal = torch.empty(shape, dtype=torch.float64, device="cpu").normal_(generator=generator)
        blocks.append(task_vectors(task, normal, generator))
    return torch.cat(blocks)[: task.n_tasks]
