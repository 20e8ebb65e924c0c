"""Linear attention followed to its last plateau: exact flow against full-batch descent.

The plain loop is full-batch gradient descent on whole token matrices of P = 5000 sequences, with the paper's
learning rate and, as in its code, without the factor 1/N. It is timed for STEPS steps, and the ratio is for the
number of steps that the flow says it needs until the loss is within 1% of its end.
"""

import numpy as np
import plain
import pytest

from analyses.lib.theory.linear_dynamics import learning_rate_time
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.theory.linear import SeparateHeads, modes, population_moments, separate_heads
from mechinterp.training.linear import flow
from mechinterp.training.linear_models import training_set

EIGENVALUES, LENGTH, SEQUENCES = (0.4, 0.3, 0.2, 0.1), 31, 5000
LEARNING_RATE, STEPS, ROUNDS = 0.02, 40, 3
LAW = CovarianceConfig(kind="eigenvalues", eigenvalues=EIGENVALUES)
TASK = TaskConfig(d_x=4, context_length=LENGTH, covariance=LAW, beta_var=1.0, noise_var=0.0)
MOMENTS = population_moments(np.array(EIGENVALUES), context_length=LENGTH)
TAU, FACTOR = learning_rate_time(LEARNING_RATE, n_factors=3, context_length=LENGTH)


@pytest.fixture(scope="module")
def prompts():
    return next(iter(training_set(TASK, SEQUENCES, seed=0)))


@pytest.fixture(scope="module")
def loop(prompts):
    tokens, target = prompts.tokens.float(), prompts.y_query[:, 0].float()
    code = separate_heads(5, 4, std=0.01, seed=0)
    return plain.linear_descent(code, tokens, target, learning_rate=LEARNING_RATE)


def heads() -> SeparateHeads:
    code = separate_heads(5, 4, std=0.01, seed=0)
    return SeparateHeads(v=FACTOR * code.v, K=FACTOR * code.K, Q=FACTOR * code.Q)


def followed():
    until = 1.01 * modes(MOMENTS).levels[-1]
    return flow(heads(), MOMENTS, duration=1e7, tau=TAU, until_loss=until)


def test_exact_flow(versus, loop):
    steps = round(followed().time[-1])
    name = f"exact flow as long as {steps} steps (plain: {STEPS} of them timed)"
    versus(name, followed, lambda: loop(STEPS), work=steps / STEPS, rounds=ROUNDS)
