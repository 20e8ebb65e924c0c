"""Functions of prompts along the pairs, written as loops, apart from the algorithms of the package: members of each label,
and near misses that no label fits.

Each maker returns a function from prompts to predictions [batch, d_y]; all compute in float64, from w = 0.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mechinterp import Prompts

Learner = Callable[[Prompts], Tensor]
Arrays = tuple[Tensor, Tensor, Tensor]


def arrays(prompts: Prompts) -> Arrays:
    """x, y and x_query in float64."""
    return prompts.x.double(), prompts.y.double(), prompts.x_query.double()


def read(query: Tensor, w: Tensor) -> Tensor:
    """<w, x_query> for each prompt and response."""
    return torch.einsum("bd,bdy->by", query, w)


def forgetting(eta: float, alpha: float, *, length: int | None = None) -> Learner:
    """(eta / L) sum_l alpha^age y_l <x_l, q>; with a length, divided by it in place of L."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x.new_zeros(len(x), x.shape[2], y.shape[2])
        for pair in range(x.shape[1]):
            w = alpha * w + torch.einsum("bd,by->bdy", x[:, pair], y[:, pair])
        return eta / (length or x.shape[1]) * read(query, w)

    return predict


def online(
    step: Callable[[int, Tensor], Tensor | float],
    *,
    gate: float = 1.0,
    momentum: float = 0.0,
    average: bool = False,
) -> Learner:
    """w <- gate w + step x (y - gate <w, x>); the step is a function of the pair's place and |x|^2.

    Args:
        momentum: Fraction of the last change of w that is added to the next.
        average: True: the prediction is that of the mean of w over the pairs.
    """

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x.new_zeros(len(x), x.shape[2], y.shape[2])
        last, mean = torch.zeros_like(w), torch.zeros_like(w)
        for pair in range(x.shape[1]):
            here, kept = x[:, pair], gate * w
            error = y[:, pair] - read(here, kept)
            size = step(pair, here.square().sum(1))
            size = torch.as_tensor(size, dtype=x.dtype).expand(len(x))
            change = torch.einsum("b,bd,by->bdy", size, here, error) + momentum * last
            w, last = kept + change, change
            mean = mean + (w - mean) / (pair + 1)
        return read(query, mean if average else w)

    return predict


def times(learner: Learner, factor: float) -> Learner:
    """A learner whose predictions are multiplied by a factor."""
    return lambda prompts: factor * learner(prompts)


def lms(eta: float) -> Learner:
    """Least mean squares: the delta rule."""
    return online(lambda pair, square: eta)


def normed(eta: float, c: float, gate: float = 1.0) -> Learner:
    """Normed delta rule, with steps eta / (c + |x|^2)."""
    return online(lambda pair, square: eta / (c + square), gate=gate)


def gated(eta: float, gate: float) -> Learner:
    """Gated delta rule."""
    return online(lambda pair, square: eta, gate=gate)


def weighted_ridge(weights: Callable[[int], Tensor], penalty: Callable[[int], float]) -> Learner:
    """Least squares with a weight for each pair and a penalty, both functions of the number of pairs."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        weighted = x * weights(x.shape[1]).to(x)[:, None]
        ridge = penalty(x.shape[1]) * torch.eye(x.shape[2], dtype=x.dtype)
        return read(query, torch.linalg.solve(weighted.mT @ x + ridge, weighted.mT @ y))

    return predict


def faded(alpha: float) -> Callable[[int], Tensor]:
    """alpha^age of each pair."""
    return lambda n: alpha ** torch.arange(n - 1, -1, -1, dtype=torch.float64)


def recursive(alpha: float, penalty: float) -> Learner:
    """Recursive least squares with a constant penalty: a mesa layer."""
    return weighted_ridge(faded(alpha), lambda n: penalty)


def textbook(alpha: float, penalty: float) -> Learner:
    """The recursion of textbooks from P = I / penalty, one pair after another."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x.new_zeros(len(x), x.shape[2], y.shape[2])
        P = torch.eye(x.shape[2], dtype=x.dtype).expand(len(x), -1, -1) / penalty
        for pair in range(x.shape[1]):
            here = x[:, pair]
            Px = torch.einsum("bij,bj->bi", P, here)
            gain = Px / (alpha + (Px * here).sum(1, keepdim=True))
            error = y[:, pair] - read(here, w)
            w = w + gain[..., None] * error[:, None]
            P = (P - gain[..., None] * Px[:, None]) / alpha
        return read(query, w)

    return predict


def mixed(levels: Sequence[tuple[float, float]], beta_var: float) -> Learner:
    """Posterior mean over hidden noise levels, by Gaussian conditioning."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        logs, means = [], []
        for variance, weight in levels:
            C = beta_var * x @ x.mT + variance * torch.eye(x.shape[1], dtype=x.dtype)
            solved = torch.linalg.solve(C, y)
            logdet = torch.linalg.slogdet(C).logabsdet
            square = (y * solved).sum((1, 2))
            logs.append(-(square + y.shape[2] * logdet) / 2 + torch.tensor(weight).log())
            means.append(beta_var * read(query, x.mT @ solved))
        p = torch.softmax(torch.stack(logs), 0)
        return (p[..., None] * torch.stack(means)).sum(0)

    return predict


def momentum(eta: float, share: float) -> Learner:
    """LMS with momentum."""
    return online(lambda pair, square: eta, momentum=share)


def averaged(eta: float) -> Learner:
    """Mean of the weights of LMS over the pairs."""
    return online(lambda pair, square: eta, average=True)


def falling(eta: float, power: float) -> Learner:
    """LMS whose step falls with the place of the pair."""
    return online(lambda pair, square: eta / (1 + pair) ** power)


def heavy_ball(eta: float, share: float, steps: int) -> Learner:
    """Batch descent with momentum, whose pairs are a set."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x.new_zeros(len(x), x.shape[2], y.shape[2])
        last = torch.zeros_like(w)
        for _ in range(steps):
            last = eta * x.mT @ (y - x @ w) / x.shape[1] + share * last
            w = w + last
        return read(query, w)

    return predict


def conjugate_gradients(steps: int) -> Learner:
    """Conjugate gradients on the squared error of all pairs."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        S, rest = x.mT @ x, x.mT @ y
        w, direction = torch.zeros_like(rest), rest
        for _ in range(steps):
            curved = S @ direction
            size = rest.square().sum(1, keepdim=True)
            rate = size / (direction * curved).sum(1, keepdim=True)
            w, rest = w + rate * direction, rest - rate * curved
            direction = rest + rest.square().sum(1, keepdim=True) / size * direction
        return read(query, w)

    return predict


def sliding(window: int, penalty: float) -> Learner:
    """Ridge regression on the last pairs alone."""

    def weights(n: int) -> Tensor:
        return (torch.arange(n - 1, -1, -1) < window).double()

    return weighted_ridge(weights, lambda n: penalty)


def sliding_step(eta: float, window: int) -> Learner:
    """One step of descent on the last pairs alone."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x[:, -window:].mT @ y[:, -window:]
        return eta / x.shape[1] * read(query, w)

    return predict


def two_decays(first: Learner, second: Learner, share: float) -> Learner:
    """Weighted mean of two learners, such as of two gates."""
    return lambda prompts: share * first(prompts) + (1 - share) * second(prompts)


def gate_of_x(eta: float, bias: float, slope: float) -> Learner:
    """Gated linear attention whose gate depends on the first coordinate of x."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x.new_zeros(len(x), x.shape[2], y.shape[2])
        for pair in range(x.shape[1]):
            here = x[:, pair]
            gate = torch.sigmoid(bias + slope * here[:, 0])[:, None, None]
            w = gate * w + torch.einsum("bd,by->bdy", here, y[:, pair])
        return eta / x.shape[1] * read(query, w)

    return predict


def two_chunks(eta: float) -> Learner:
    """A step of batch descent on the first half of the pairs, then one on the second half."""

    def predict(prompts: Prompts) -> Tensor:
        x, y, query = arrays(prompts)
        w = x.new_zeros(len(x), x.shape[2], y.shape[2])
        half = x.shape[1] // 2
        for rows in (slice(half), slice(half, None)):
            w = w + eta * x[:, rows].mT @ (y[:, rows] - x[:, rows] @ w) / half
        return read(query, w)

    return predict
