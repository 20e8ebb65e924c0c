"""Time to mask heads, each alone and in all subsets, against a plain loop of `run_with_hooks`, in one run on one thread.

    python tests/benchmarks/masking_speed.py

The plain loop is what TransformerLens offers: the whole model anew for every mask, at every position. Both take
the prompts in pieces of the same size, and both answers are compared. Times are those of the processor.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from mechinterp.analysis.heads import ablate_subsets
from mechinterp.analysis.masking import CHUNK, mask_heads, masked_predictions
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.functional import AttentionWeights
from mechinterp.models.transformer import ICLTransformer

T = TypeVar("T")
N_PROMPTS, N_HEADS, TOLERANCE = 4096, 8, 1e-5


def every_head_of_a_deep_model(score: str = "linear/L") -> float:
    """How many times faster: 4 layers of 8 heads, width 64, each head masked alone."""
    task = TaskConfig(d_x=16, context_length=32)
    model = ICLTransformer(
        **{"d_x": 16, "d_y": 1, "n_layers": 4, "n_heads": N_HEADS, "d_model": 64, "d_head": 8},
        **{"score": score, "context_only": True},
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 * parameter.shape[-2] ** -0.5, generator=generator)
    prompts = sample_prompts(task, N_PROMPTS, generator=generator_for(0, "eval", 0))
    masks = [[(layer, head)] for layer in range(4) for head in range(N_HEADS)]
    fast, found = _timed(lambda: masked_predictions(model, prompts, masks))
    plain, expected = _timed(lambda: _plain(model, prompts, masks))
    return _ratio(f"32 heads of 4 layers, {score}", plain, fast, found, expected)


def every_subset_of_one_layer() -> float:
    """How many times faster: all 256 subsets of one layer's 8 heads."""
    task = TaskConfig()
    generator = torch.Generator().manual_seed(0)
    W_Q, W_K, W_V = (torch.randn(N_HEADS, 6, 6, generator=generator) / 6**0.5 for _ in range(3))
    W_O = torch.randn(N_HEADS, 6, 1, generator=generator) / 6**0.5
    model = ICLTransformer.from_weights(
        AttentionWeights(W_Q, W_K, W_V, W_O, scale=6**-0.5), task=task
    )
    prompts = sample_prompts(task, N_PROMPTS, generator=generator_for(0, "eval", 0))
    fast, subsets = _timed(lambda: ablate_subsets(model, prompts))
    masks = [[(0, int(head)) for head in (~kept).nonzero()[0]] for kept in subsets.kept]
    plain, expected = _timed(lambda: _plain(model, prompts, masks))
    risks = (expected - prompts.y_query_clean).square().mean((1, 2))
    return _ratio("256 subsets of a layer", plain, fast, torch.tensor(subsets.risk), risks.double())


def _plain(
    model: ICLTransformer, prompts: Prompts, masks: Sequence[Sequence[tuple[int, int]]]
) -> Tensor:
    outputs = []
    with torch.no_grad():
        for heads in masks:
            parts = [
                model.run_with_hooks(
                    prompts[i : i + CHUNK].tokens, fwd_hooks=mask_heads(list(heads))
                )
                for i in range(0, len(prompts), CHUNK)
            ]
            outputs.append(torch.cat(parts)[:, -1])
    return torch.stack(outputs)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def _ratio(what: str, plain: float, fast: float, found: Tensor, expected: Tensor) -> float:
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    assert error < TOLERANCE, error
    print(
        f"{what}: {plain:.2f} s of processor time against {fast:.3f} s, {plain / fast:.1f} times (difference {error:.0e})"
    )
    return plain / fast


def main() -> None:
    torch.set_num_threads(1)
    every_head_of_a_deep_model()
    every_subset_of_one_layer()


if __name__ == "__main__":
    main()
