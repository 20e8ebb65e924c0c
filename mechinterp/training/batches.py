"""Large batches in little memory, drawn and used chunk by chunk.

The chunk size follows from the task alone, so that results do not depend on the machine.
"""

from collections.abc import Iterator

import torch

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.memory import prompt_bytes

CHUNK_BYTES = 2**24
"""Random numbers per chunk, in bytes; at least one prompt is drawn. 16,710 prompts of the default task."""


def batch_chunks(
    task: TaskConfig,
    n_prompts: int,
    *,
    generator: torch.Generator,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Prompts]:
    """Fresh prompts of a batch, in chunks of at most CHUNK_BYTES.

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
    """Largest number of prompts of a batch that are drawn at once."""
    return max(1, CHUNK_BYTES // prompt_bytes(task))
