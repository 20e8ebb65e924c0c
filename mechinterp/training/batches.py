"""Prompts of a training batch, drawn chunk by chunk; the size of a chunk follows from the task alone, so that results do not
depend on the machine."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Numbers, Prompts, draw_prompts
from mechinterp.memory import prompt_bytes

BATCH_CHUNK_BYTES = 2**24
"""Random numbers per chunk of a batch, in bytes; at least one prompt is drawn. 16,710 prompts of the default task."""
LANES = 16
"""Number of prompts in a block of the compiled steps, which compute with one vector of numbers for all of them. At the
default task a block, its attention weights and their gradients fit into a first-level cache of 32 KB."""
WHOLE = 32
"""The compiled steps add zero prompts up to a multiple of this number. It decides the order of their sums, and so the bits
of a seed."""


def batch_chunks(
    task: TaskConfig,
    n_prompts: int,
    *,
    generator: torch.Generator,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    numbers: Numbers | None = None,
) -> Iterator[Prompts]:
    """Fresh prompts of a batch, in chunks of at most BATCH_CHUNK_BYTES.

    Args:
        context_length: Pairs per prompt; None: the task's own.
        numbers: Function that draws standard normal numbers; None: torch.
    Example:
        >>> from mechinterp.icl.prompts import generator_for
        >>> [len(c) for c in batch_chunks(TaskConfig(), 20_000, generator=generator_for(0, "train", 0))]
        [16710, 3290]
    """
    size = largest_chunk(task)
    for start in range(0, n_prompts, size):
        n = min(size, n_prompts - start)
        yield draw_prompts(
            *(task, n),
            generator=generator,
            context_length=context_length,
            dtype=dtype,
            numbers=numbers,
        )


def largest_chunk(task: TaskConfig) -> int:
    """Largest number of prompts of a batch that are drawn at once."""
    return max(1, BATCH_CHUNK_BYTES // prompt_bytes(task))


def narrowed(prompts: Prompts, d_x: int) -> Prompts:
    """Prompts whose coordinates of x beyond the first `d_x` are 0, and whose y no longer depends on them.

    Example:
        >>> from mechinterp.icl.prompts import generator_for
        >>> prompts = draw_prompts(TaskConfig(noise_var=0.0), 4, generator=generator_for(0, "train", 0))
        >>> narrow = narrowed(prompts, 2)
        >>> torch.allclose(narrow.y, prompts.x[..., :2] @ prompts.beta[:, :2], atol=1e-6)
        True
    """
    beta = prompts.task_vectors("A curriculum")[:, d_x:]
    gone = prompts.x[..., d_x:] @ beta
    at_query = (prompts.x_query[:, None, d_x:] @ beta)[:, 0]
    x, x_query = prompts.x.clone(), prompts.x_query.clone()
    x[..., d_x:], x_query[..., d_x:] = 0, 0
    changed = {name: getattr(prompts, name) - at_query for name in ("y_query", "y_query_clean")}
    return replace(prompts, x=x, y=prompts.y - gone, x_query=x_query, **changed)
