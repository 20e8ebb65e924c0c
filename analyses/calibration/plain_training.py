"""One-layer attention models trained by plain PyTorch, for the calibration of labels.

    OMP_NUM_THREADS=1 python -m analyses.calibration.plain_training  (a quarter of an hour on one core)

Nothing of the package trains or runs them: prompts, attention, loss and Adam are written out here. The replicas of a
setting differ in their initial weights (PyTorch's default, uniform up to 1 / sqrt(d_model)) and see the same prompts.
Each model has separate W_q, W_k, W_v, W_o of full width, and its circuits are stored in plain_trained.safetensors:
QK = W_q W_k^T / sqrt(d_model) for softmax, W_q W_k^T for linear attention, whose scores are x·x / L; OV = W_v W_o.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

TRAINED = Path(__file__).with_name("plain_trained.safetensors")
REPLICAS = 6
STEPS, RATE = 6000, 3e-3
BATCH = 128
SEED = 20_261_128


@dataclass(frozen=True)
class Setting:
    """Task and shape of the models of one training."""

    score: str
    """"softmax" or "linear"."""
    d_x: int
    length: int
    """Number of pairs."""
    heads: int
    d_y: int = 1
    noise: float = 0.1
    """Variance of the noise of y."""
    spread: float = 1.0
    """Largest over smallest variance of the coordinates of x; their mean is 1, and they form a geometric series."""
    supports: tuple[tuple[int, ...], ...] = ()
    """Coordinates that each response depends on; none: all."""

    @property
    def name(self) -> str:
        return (
            f"{self.score}-d{self.d_x}-L{self.length}-h{self.heads}-y{self.d_y}"
            f"-noise{self.noise:g}-spread{self.spread:g}{'-supports' * bool(self.supports)}"
        )

    @property
    def variances(self) -> Tensor:
        values = torch.logspace(0, math.log10(self.spread), self.d_x, dtype=torch.float64)
        return values / values.mean()

    @property
    def mask(self) -> Tensor:
        """1 where a response depends on a coordinate, [d_x, d_y]."""
        if not self.supports:
            return torch.ones(self.d_x, self.d_y)
        mask = torch.zeros(self.d_x, self.d_y)
        for response, support in enumerate(self.supports):
            mask[list(support), response] = 1
        return mask


SETTINGS = (
    Setting("softmax", 2, 5, 2),
    Setting("softmax", 2, 20, 2),
    Setting("softmax", 3, 12, 1),
    Setting("softmax", 3, 30, 3, noise=0.5),
    Setting("softmax", 4, 100, 2),
    Setting("softmax", 5, 200, 2, noise=0.01),
    Setting("softmax", 6, 24, 4),
    Setting("softmax", 8, 32, 2),
    Setting("softmax", 8, 64, 1),
    Setting("softmax", 12, 60, 2),
    Setting("softmax", 16, 128, 2),
    Setting("softmax", 24, 96, 2),
    Setting("softmax", 24, 200, 1),
    Setting("softmax", 3, 15, 2, spread=10),
    Setting("softmax", 4, 40, 2, spread=10),
    Setting("softmax", 8, 80, 2, spread=30),
    Setting("softmax", 12, 120, 3, spread=10),
    Setting("softmax", 16, 160, 2, spread=3),
    Setting("softmax", 3, 24, 2, d_y=2),
    Setting("softmax", 6, 60, 4, d_y=2),
    Setting("softmax", 8, 100, 3, d_y=2),
    Setting("softmax", 6, 48, 4, d_y=2, supports=((0, 1, 2, 3), (2, 3, 4, 5))),
    Setting("softmax", 4, 40, 4, d_y=2, supports=((0, 1), (2, 3))),
    Setting("linear", 2, 5, 1),
    Setting("linear", 4, 20, 2),
    Setting("linear", 8, 200, 1),
    Setting("linear", 12, 50, 4),
)


def drawn(setting: Setting, n_prompts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (x, y) [batch, L + 1, d_x + d_y], whose last has y = 0, and the responses of the query [batch, d_y]."""
    size = (n_prompts, setting.length + 1, setting.d_x)
    x = torch.randn(size, generator=generator) * setting.variances.sqrt().float()
    beta = torch.randn((n_prompts, setting.d_x, setting.d_y), generator=generator) * setting.mask
    beta = beta / setting.mask.sum(0).sqrt()
    y = x @ beta
    y = y + setting.noise**0.5 * torch.randn(y.shape, generator=generator)
    tokens = torch.cat([x, y], 2)
    target = tokens[:, -1, setting.d_x :].clone()
    tokens[:, -1, setting.d_x :] = 0
    return tokens, target


def predictions(setting: Setting, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Predictions of all replicas, [replica, batch, d_y]; the query attends to the pairs only."""
    pairs, query = tokens[:, :-1], tokens[:, -1]
    keys = torch.einsum("bi,rhij,rhkj->brhk", query, weights["q"], weights["k"])
    n_replicas, n_heads = keys.shape[1:3]
    scores = torch.bmm(keys.flatten(1, 2), pairs.mT)
    if setting.score == "softmax":
        pattern = torch.softmax(scores / tokens.shape[2] ** 0.5, 2)
    else:
        pattern = scores / setting.length
    seen = torch.bmm(pattern, pairs).unflatten(1, (n_replicas, n_heads))
    return torch.einsum("brhi,rhij,rhjn->rbn", seen, weights["v"], weights["o"])


def trained(setting: Setting, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Weights of the replicas after training, and their last loss over that of predicting 0."""
    generator = torch.Generator().manual_seed(seed)
    d_model = setting.d_x + setting.d_y
    shape = (REPLICAS, setting.heads, d_model, d_model)
    bound = d_model**-0.5
    weights = {
        name: (2 * torch.rand(shape, generator=generator) - 1) * bound for name in ("q", "k", "v")
    }
    out = 2 * torch.rand((*shape[:3], setting.d_y), generator=generator) - 1
    weights["o"] = out * (bound / setting.heads**0.5)
    for weight in weights.values():
        weight.requires_grad_()
    optimiser = torch.optim.Adam(list(weights.values()), lr=RATE)
    falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - 0.99 * step / STEPS)
    for _ in range(STEPS):
        tokens, target = drawn(setting, BATCH, generator)
        error = (predictions(setting, weights, tokens) - target).square().mean((1, 2))
        optimiser.zero_grad()
        error.sum().backward()
        # Replicas are clipped one by one, so that they do not depend on each other.
        with torch.no_grad():
            squares = sum(w.grad.square().flatten(1).sum(1) for w in weights.values())
            factor = (1 / squares.sqrt().clamp_min(1)).nan_to_num(0)
            for weight in weights.values():
                weight.grad.nan_to_num_(0).mul_(factor[:, None, None, None])
        optimiser.step()
        falling.step()
    with torch.no_grad():
        tokens, target = drawn(setting, 4096, generator)
        error = (predictions(setting, weights, tokens) - target).square().mean((1, 2))
    return {name: w.detach() for name, w in weights.items()}, error / target.square().mean()


def main() -> None:
    torch.set_num_threads(1)
    tensors = {}
    for number, setting in enumerate(SETTINGS):
        weights, loss = trained(setting, SEED + number)
        scale = 1.0 if setting.score == "linear" else (setting.d_x + setting.d_y) ** 0.5
        QK = weights["q"] @ weights["k"].mT / scale
        OV = weights["v"] @ weights["o"]
        tensors |= {
            f"{setting.name}/QK": QK,
            f"{setting.name}/OV": OV,
            f"{setting.name}/loss": loss,
        }
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, TRAINED)
        print(setting.name, flush=True)


if __name__ == "__main__":
    main()
