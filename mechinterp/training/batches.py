"""Large batches in little memory, drawn and used chunk by chunk.

The size of a chunk follows from the task alone, so that results depend on no machine.
"""

from collections.abc import Iterator

import torch

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.memory import prompt_bytes

CHUNK_BYTES = 2**24
"""Of random numbers that are drawn at once, if that is a prompt or more; 16,710 prompts of the default task."""


def batch_chunks(
    task: TaskConfig,
    n_prompts: int,
    *,
    generator: torch.Generator,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Prompts]:
    """A batch of fresh prompts, in chunks of as many as go into CHUNK_BYTES.

    Args:
        context_length: Pairs per prompt; None: the task's own.
    Example:
        >>> from mechinterp.icl.prompts import generator_for
        >>> [len(c) for c in batch_chunks(TaskConfig(), 20_000, generator=generator_for(0, "train", 0))]
        [16710, 3290]
    """
    size = largest_chunk(task)
    for start in range(0, n_prompts, size):
        n = min(size, n_prompts - start)
        yield sample_prompts(
            task, n, generator=generator, context_length=context_length, dtype=dtype
        )


def largest_chunk(task: TaskConfig) -> int:
    """How many prompts of a batch are drawn at once, at most."""
    return max(1, CHUNK_BYTES // prompt_bytes(task))
