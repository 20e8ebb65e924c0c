"""Time to follow linear attention to its last plateau: exact flow against a plain loop, in one run on one thread.

    python tests/benchmarks/flow_speed.py

The plain loop is what one would write first: full-batch gradient descent by automatic differentiation on whole
token matrices of P = 5000 sequences, with the paper's learning rate and, as in its code, without the factor 1/N.
It is timed for STEPS steps and extrapolated to the number of steps that the flow says it needs until the loss is within 1% of its end.
"""

import statistics
import time

import numpy as np
import torch

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.theory.linear import modes, population_moments
from mechinterp.theory.linear_dynamics import learning_rate_time
from mechinterp.theory.linear_heads import SeparateHeads, separate_heads
from mechinterp.training.descent import full_batch_descent, sample_moments, training_set
from mechinterp.training.flow import flow

EIGENVALUES, LENGTH, SEQUENCES = (0.4, 0.3, 0.2, 0.1), 31, 5000
LEARNING_RATE, STEPS, ROUNDS = 0.02, 40, 3


def plain_seconds_per_step(
    heads: SeparateHeads, tokens: torch.Tensor, target: torch.Tensor
) -> float:
    weights = [torch.tensor(part).float().requires_grad_() for part in (heads.v, heads.K, heads.Q)]
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)
    start = time.perf_counter()
    for _ in range(STEPS):
        v, K, Q = weights
        keys, queries = tokens[..., :-1] @ K[:, 0].T, tokens[:, -1, :-1] @ Q[:, 0].T
        values = tokens[..., -1:] * v
        y_hat = torch.einsum("bnh,bnh,bh->b", values, keys, queries)
        loss = (y_hat - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    moments = population_moments(np.array(EIGENVALUES), context_length=LENGTH)
    tau, factor = learning_rate_time(LEARNING_RATE, n_factors=3, context_length=LENGTH)
    found, code = modes(moments), separate_heads(5, 4, std=0.01, seed=0)
    heads = SeparateHeads(v=factor * code.v, K=factor * code.K, Q=factor * code.Q)
    law = CovarianceConfig(kind="eigenvalues", eigenvalues=EIGENVALUES)
    task = TaskConfig(d_x=4, context_length=LENGTH, covariance=law, beta_var=1.0, noise_var=0.0)
    prompts = next(iter(training_set(task, SEQUENCES, seed=0)))
    tokens, target = prompts.tokens.float(), prompts.y_query[:, 0].float()
    exact, plain, moment = [], [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run = flow(heads, moments, duration=1e7, tau=tau, until_loss=1.01 * found.levels[-1])
        exact.append(time.perf_counter() - start)
        plain.append(run.time[-1] * plain_seconds_per_step(code, tokens, target))
        start = time.perf_counter()
        sampled = sample_moments([prompts], basis=found.vectors)
        steps = round(run.time[-1])
        full_batch_descent(
            heads, sampled, found, learning_rate=1 / (2 * tau), steps=steps, every=50
        )
        moment.append(time.perf_counter() - start)
    seconds = [statistics.median(times) for times in (exact, moment, plain)]
    print(f"exact flow {seconds[0]:.2f} s, descent on the set's moments {seconds[1]:.2f} s")
    print(
        f"plain loop {seconds[2]:.0f} s for {steps} steps, extrapolated from {STEPS}: "
        f"{seconds[2] / seconds[0]:.0f} and {seconds[2] / seconds[1]:.0f} times as long"
    )


if __name__ == "__main__":
    main()
