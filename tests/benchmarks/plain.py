"""The code one would write first, as the papers' own: nn.Linear layers and automatic differentiation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from mechinterp.config import ExperimentConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import SeparateHeads

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Multi-head softmax attention of a query over the context, read out at y."""

    def __init__(self, d_model: int, n_heads: int, d_y: int = 1):
        super().__init__()
        self.n_heads, self.d_model, width = n_heads, d_model, d_model * n_heads
        self.q, self.k, self.v = (nn.Linear(d_model, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, d_y, bias=False)

    def forward(self, query: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        def split(z: torch.Tensor) -> torch.Tensor:
            return z.view(*z.shape[:2], self.n_heads, self.d_model).transpose(1, 2)

        q, k, v = split(self.q(query)), split(self.k(context)), split(self.v(context))
        pattern = torch.softmax(q @ k.mT / self.d_model**0.5, dim=-1)
        return self.o((pattern @ v).transpose(1, 2).flatten(2))[:, 0]


def attention(weights: Weights) -> Attention:
    """The same model as plain layers; without gradients."""
    model = Attention(weights.d_x + weights.d_y, weights.n_heads, weights.d_y)
    with torch.no_grad():
        for layer, W in ((model.q, weights.W_Q), (model.k, weights.W_K), (model.v, weights.W_V)):
            layer.weight.copy_(W[0].mT.flatten(0, 1))
        model.o.weight.copy_(weights.W_O[0, ..., weights.d_x :].flatten(0, 1).T)
    return model.requires_grad_(False)


def sample(n_prompts: int = 256) -> Batch:
    """Query token, context tokens and y_query of the softmax paper's task."""
    x, beta = torch.randn(n_prompts, 41, 5), torch.randn(n_prompts, 5, 1) / 5**0.5
    y = x @ beta + 0.1**0.5 * torch.randn(n_prompts, 41, 1)
    tokens = torch.cat([x, y], -1)
    query = torch.cat([x[:, -1:], torch.zeros(n_prompts, 1, 1)], -1)
    return query, tokens[:, :-1], y[:, -1]


def training(n_heads: int) -> Callable[[int], None]:
    """Runs so many steps of Adam."""
    model = Attention(6, n_heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run(steps: int) -> None:
        for _ in range(steps):
            query, context, y_query = sample()
            loss = (model(query, context) - y_query).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


PATTERNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear/L": lambda scores: scores / scores.shape[-1],
    "relu/L": lambda scores: torch.relu(scores) / scores.shape[-1],
    "softmax": lambda scores: torch.softmax(scores, dim=-1),
}


class Layer(nn.Module):
    """Attention of all tokens over those before the last, added to the stream; with d_mlp as in GPT-2: with an MLP,
    norms before both and biases."""

    def __init__(self, d_model: int, n_heads: int, score: str, d_mlp: int | None):
        super().__init__()
        self.n_heads, self.pattern = n_heads, PATTERNS[score]
        biases = d_mlp is not None
        maps = (nn.Linear(d_model, d_model, bias=biases) for _ in range(4))
        self.q, self.k, self.v, self.o = maps
        self.norm, self.mlp = nn.Identity(), None
        if d_mlp is not None:
            self.norm = nn.LayerNorm(d_model)
            hidden = nn.Linear(d_model, d_mlp), nn.GELU(), nn.Linear(d_mlp, d_model)
            self.mlp = nn.Sequential(nn.LayerNorm(d_model), *hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        def split(z: torch.Tensor) -> torch.Tensor:
            return z.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

        read = self.norm(stream)
        context = read[:, :-1]
        q, k, v = split(self.q(read)), split(self.k(context)), split(self.v(context))
        pattern = self.pattern(q @ k.mT / q.shape[-1] ** 0.5)
        stream = stream + self.o((pattern @ v).transpose(1, 2).flatten(2))
        return stream if self.mlp is None else stream + self.mlp(stream)


def deep_training(config: ExperimentConfig, lengths: list[int]) -> Callable[[], None]:
    """Runs a step of Adam of a model of several layers at each of these lengths of the context."""
    architecture, d_x, n_prompts = config.model, config.task.d_x, config.train.batch_size
    d_model, d_mlp, biases = config.d_model, architecture.d_mlp, architecture.d_mlp is not None
    layers = [
        Layer(d_model, architecture.n_heads, architecture.score, d_mlp)
        for _ in range(architecture.n_layers)
    ]
    last = nn.LayerNorm(d_model) if biases else nn.Identity()
    ends = nn.Linear(d_x + 1, d_model, bias=biases), nn.Linear(d_model, 1, bias=biases)
    model = nn.Sequential(ends[0], *layers, last, ends[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run() -> None:
        for length in lengths:
            x, beta = torch.randn(n_prompts, length + 1, d_x), torch.randn(n_prompts, d_x, 1)
            y = x @ beta / d_x**0.5 + 0.1**0.5 * torch.randn(n_prompts, length + 1, 1)
            tokens = torch.cat([x, y], -1)
            tokens[:, -1, -1] = 0
            loss = (model(tokens)[:, -1] - y[:, -1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def linear_descent(
    heads: SeparateHeads, tokens: torch.Tensor, target: torch.Tensor, *, learning_rate: float
) -> Callable[[int], None]:
    """Runs so many steps of full-batch gradient descent of linear attention."""
    weights = [torch.tensor(part).float().requires_grad_() for part in (heads.v, heads.K, heads.Q)]
    optimizer = torch.optim.SGD(weights, lr=learning_rate)

    def run(steps: int) -> None:
        for _ in range(steps):
            v, K, Q = weights
            keys, queries = tokens[..., :-1] @ K[:, 0].T, tokens[:, -1, :-1] @ Q[:, 0].T
            y_hat = torch.einsum("bnh,bnh,bh->b", tokens[..., -1:] * v, keys, queries)
            loss = (y_hat - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def gpt2_training(config: ExperimentConfig, steps: int) -> Callable[[], None]:
    """Steps of Hugging Face's GPT2Model on the loss at every position, as public repositories write them."""
    from transformers import GPT2Config, GPT2Model

    model, task = config.model, config.task
    sizes = {"n_embd": model.d_model, "n_layer": model.n_layers, "n_head": model.n_heads}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt2 = GPT2Model(
        GPT2Config(n_positions=model.n_positions, **sizes, **dropouts, use_cache=False)
    )
    read_in, read_out = torch.nn.Linear(task.d_x, model.d_model), torch.nn.Linear(model.d_model, 1)
    parameters = [p for part in (gpt2, read_in, read_out) for p in part.parameters()]
    adam = torch.optim.Adam(parameters, lr=config.train.learning_rate)

    def loop() -> None:
        for _ in range(steps):
            xs = torch.randn(config.train.batch_size, task.context_length + 1, task.d_x)
            beta = torch.randn(len(xs), task.d_x, 1)
            ys = (xs @ beta)[..., 0] + task.noise_var**0.5 * torch.randn(xs.shape[:2])
            wide = torch.cat([ys[..., None], torch.zeros(*ys.shape, task.d_x - 1)], 2)
            tokens = torch.stack([xs, wide], 2).flatten(1, 2)
            hidden = gpt2(inputs_embeds=read_in(tokens)).last_hidden_state
            loss = (read_out(hidden)[:, ::2, 0] - ys).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()

    return loop


class Recurrent(nn.Module):
    """One head that writes pairs into a state token by token, as the naive forms of flash-linear-attention do, and is asked
    at every x."""

    def __init__(self, d_model: int, d_x: int, rule: str):
        super().__init__()
        self.rule, self.d_x = rule, d_x
        self.q, self.k, self.v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.o = nn.Linear(d_model, 1, bias=False)
        self.gate, self.beta = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(0.0))
        self.ridge = nn.Parameter(torch.zeros(d_model))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        k, v = self.k(tokens), self.v(tokens)
        q = self.q(torch.cat([tokens[..., : self.d_x], torch.zeros_like(tokens[..., :1])], -1))
        gate, beta = torch.sigmoid(self.gate), torch.sigmoid(self.beta)
        S = H = tokens.new_zeros(len(tokens), k.shape[-1], k.shape[-1])
        states, moments = [], []
        for t in range(tokens.shape[1]):
            states.append(S)
            moments.append(H)
            key, value = k[:, t, :, None], v[:, t, None]
            if self.rule == "gated":
                S = gate * S + key * value
            elif self.rule == "mesa":
                H = gate * H + beta * key * key.mT
                S = gate * S + beta * key * value
            else:
                S = gate * S
                S = S + beta * key * (value - (S * key).sum(1, keepdim=True))
        every = torch.stack(states, 1)
        if self.rule == "mesa":
            penalty = torch.diag(nn.functional.softplus(self.ridge))
            q = torch.linalg.solve(torch.stack(moments, 1) + penalty, q)
        return self.o((q[..., None] * every).sum(-2))


def recurrent_training(config: ExperimentConfig, steps: int) -> Callable[[], None]:
    """Steps of a recurrent layer on the loss at every position, with automatic differentiation."""
    task, batch = config.task, config.train.batch_size
    layer = Recurrent(task.d_x + 1, task.d_x, config.model.score)
    adam = torch.optim.Adam(layer.parameters(), lr=config.train.learning_rate)

    def loop() -> None:
        for _ in range(steps):
            x = torch.randn(batch, task.context_length + 1, task.d_x)
            beta = torch.randn(batch, task.d_x, 1) / task.d_x**0.5
            y = x @ beta + task.noise_var**0.5 * torch.randn(*x.shape[:2], 1)
            loss = (layer(torch.cat([x, y], -1)) - y).square().mean()
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            adam.step()

    return loop


def ridges(prompts: Prompts, penalties: Sequence[float]) -> torch.Tensor:
    """Ridge regression at each penalty, one solution per prompt and penalty."""
    x, y, query = prompts.x, prompts.y, prompts.x_query[:, None]
    identity = torch.eye(x.shape[2], dtype=x.dtype)
    betas = [torch.linalg.solve(x.mT @ x + p * identity, x.mT @ y) for p in penalties]
    return torch.stack([(query @ beta)[:, 0] for beta in betas])


def losses_of_learners(
    prompts: Prompts, lengths: Sequence[int], penalty: float
) -> dict[str, list[float]]:
    """Mean losses of ridge and least squares after each number of pairs, prompt by prompt."""
    x, y = prompts.every_x.numpy(), prompts.y_of_every_x.numpy()
    found: dict[str, list[float]] = {"ridge": [], "least_squares": []}
    for n in lengths:
        errors = []
        for xs, ys in zip(x, y, strict=True):
            gram = xs[:n].T @ xs[:n] + penalty * np.eye(xs.shape[1])
            ridge = np.linalg.solve(gram, xs[:n].T @ ys[:n])
            least = np.linalg.lstsq(xs[:n], ys[:n], rcond=None)[0]
            errors.append([((xs[n] @ beta - ys[n]) ** 2).mean() for beta in (ridge, least)])
        for name, loss in zip(found, np.mean(errors, 0), strict=True):
            found[name].append(float(loss))
    return found


def fitted_descent(prompts: Prompts, target: torch.Tensor) -> torch.Tensor:
    """Step sizes of two steps of descent and the factor that shrinks x between them, fitted by Adam."""
    scalars = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([scalars], lr=0.05)
    for _ in range(100):
        x, y, query = prompts.x, prompts.y, prompts.x_query[:, None]
        y_query = torch.zeros_like(target)
        for layer in range(2):
            eta = scalars[layer] / x.shape[1]
            similarity = x @ query.mT
            y_query = y_query + eta * (similarity.mT @ y)[:, 0]
            y = y - eta * (x @ (x.mT @ y))
            if layer == 0:
                moment = x.mT @ x / x.shape[1]
                x, query = x - scalars[2] * x @ moment, query - scalars[2] * query @ moment
        loss = (y_query - target).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return scalars.detach()


def descent_on_features(features: torch.Tensor, y: torch.Tensor, steps: int) -> torch.Tensor:
    """Predictions after 0 to `steps` steps of descent on linear features, with the step 1/lambda_max of each prompt."""
    phi, query, y = features[:, :-1].double(), features[:, -1:].double(), y.double()
    gram, moment = phi.mT @ phi / phi.shape[1], phi.mT @ y / phi.shape[1]
    eta = 1 / torch.linalg.eigvalsh(gram)[:, -1, None, None]
    u = torch.zeros_like(moment)
    predictions = [(query @ u)[:, 0]]
    for _ in range(steps):
        u = u + eta * (moment - gram @ u)
        predictions.append((query @ u)[:, 0])
    return torch.stack(predictions)


class GargModel(nn.Module):
    """The model of Garg et al. 2022 in its usual size."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2Model

        super().__init__()
        sizes = {"n_embd": 256, "n_layer": 12, "n_head": 8, "n_positions": 202}
        self._read_in, self._read_out = nn.Linear(20, 256), nn.Linear(256, 1)
        self._backbone = GPT2Model(GPT2Config(**sizes, use_cache=False))
