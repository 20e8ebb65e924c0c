"""Modules of other people's architectures in plain PyTorch, and their predictions head by head, computed by other code."""

import math

import torch
from torch import nn

WIDTH, HEADS = 8, 4
EACH = WIDTH // HEADS


def split(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def joined(z: torch.Tensor) -> torch.Tensor:
    return z.transpose(1, 2).flatten(-2)


class Grouped(nn.Module):
    """Four query heads that share two heads of keys and values; causal."""

    groups = 2

    def __init__(self, sdpa: bool = False):
        super().__init__()
        self.n_heads, self.sdpa = HEADS, sdpa
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qo")
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, self.groups * EACH, bias=False) for _ in "kv")

    def forward(self, x):
        q = split(self.q_proj(x), HEADS)
        k, v = split(self.k_proj(x), self.groups), split(self.v_proj(x), self.groups)
        if self.sdpa:
            attend = nn.functional.scaled_dot_product_attention
            return self.o_proj(joined(attend(q, k, v, is_causal=True, enable_gqa=True)))
        k, v = (each.repeat_interleave(HEADS // self.groups, dim=1) for each in (k, v))
        n, device = x.shape[1], x.device
        later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
        scores = (q @ k.mT / math.sqrt(EACH)).masked_fill(later, -math.inf)
        return self.o_proj(joined(scores.softmax(-1) @ v))

    def pattern(self, x, head):
        rows, own = slice(head * EACH, (head + 1) * EACH), head // (HEADS // self.groups)
        shared = slice(own * EACH, (own + 1) * EACH)
        scores = (x @ self.q_proj.weight[rows].T) @ (x @ self.k_proj.weight[shared].T).mT
        later = torch.full(scores.shape[-2:], -math.inf).triu(1)
        return torch.softmax(scores / math.sqrt(EACH) + later, -1)

    def written(self, x, head):
        rows, own = slice(head * EACH, (head + 1) * EACH), head // (HEADS // self.groups)
        value = x @ self.v_proj.weight[own * EACH : (own + 1) * EACH].T
        return self.pattern(x, head) @ value @ self.o_proj.weight[:, rows].T


class LinearAttention(nn.Module):
    """No softmax: q.k over the number of pairs; `strict` reads earlier tokens only."""

    def __init__(self, strict: bool = False):
        super().__init__()
        self.n_heads, self.strict = HEADS, strict
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (split(part(x), HEADS) for part in (self.to_q, self.to_k, self.to_v))
        if not self.strict:  # as a state of keys and values, without a matrix of weights
            return self.to_out(joined(q @ (k.mT @ v)) / (x.shape[1] - 1))
        return self.to_out(joined((q @ k.mT).tril(-1) @ v) / (x.shape[1] - 1))

    def pattern(self, x, head):
        rows = slice(head * EACH, (head + 1) * EACH)
        products = (x @ self.to_q.weight[rows].T) @ (x @ self.to_k.weight[rows].T).mT
        return (products.tril(-1) if self.strict else products) / (x.shape[1] - 1)

    def written(self, x, head):
        rows = slice(head * EACH, (head + 1) * EACH)
        return (
            self.pattern(x, head) @ (x @ self.to_v.weight[rows].T) @ self.to_out.weight[:, rows].T
        )


class Rotary(nn.Module):
    """Queries and keys turned by their position, in one packed projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def turned(self, x):
        angle = torch.arange(x.shape[-2], dtype=x.dtype)
        return torch.stack(
            [
                x[..., 0] * angle.cos() - x[..., 1] * angle.sin(),
                x[..., 0] * angle.sin() + x[..., 1] * angle.cos(),
            ],
            -1,
        )

    def forward(self, x):
        q, k, v = (split(each, HEADS) for each in self.qkv(x).chunk(3, -1))
        attend = nn.functional.scaled_dot_product_attention
        return self.proj(joined(attend(self.turned(q), self.turned(k), v)))

    def pattern(self, x, head):
        rows = slice(head * EACH, (head + 1) * EACH)
        Q, K, _ = self.qkv.weight.chunk(3)
        q, k = self.turned(x @ Q[rows].T), self.turned(x @ K[rows].T)
        return torch.softmax(q @ k.mT / math.sqrt(EACH), -1)

    def written(self, x, head):
        rows = slice(head * EACH, (head + 1) * EACH)
        value = x @ self.qkv.weight.chunk(3)[2][rows].T
        return self.pattern(x, head) @ value @ self.proj.weight[:, rows].T


class Parameters(nn.Module):
    """Queries, keys and values made by parameters; the output projection is a module."""

    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.W_v = (
            nn.Parameter(torch.randn(HEADS, WIDTH, EACH)) for _ in range(3)
        )
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, W) for W in (self.W_q, self.W_k, self.W_v))
        pattern = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), dim=-1)
        return self.o_proj(joined(torch.einsum("bhqk,bhkd->bhqd", pattern, v)))

    def pattern(self, x, head):
        return torch.softmax((x @ self.W_q[head]) @ (x @ self.W_k[head]).mT, -1)

    def written(self, x, head):
        rows = slice(head * EACH, (head + 1) * EACH)
        return self.pattern(x, head) @ (x @ self.W_v[head]) @ self.o_proj.weight[:, rows].T


class Heads(nn.Module):
    """Each head a module of its own, with its own softmax over the root of the stream's width."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, EACH, bias=False) for _ in "qkv")

        def pattern(self, x):
            scores = self.query(x) @ self.key(x).mT / math.sqrt(WIDTH)
            later = torch.full(scores.shape[-2:], -math.inf).triu(1)
            return torch.softmax(scores + later, -1)

        def forward(self, x):
            return self.pattern(x) @ self.value(x)

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(self.One() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], -1))

    def written(self, x, head):
        rows = slice(head * EACH, (head + 1) * EACH)
        return self.heads[head](x) @ self.proj.weight[:, rows].T


class ByHand(Rotary):
    """A softmax written with exp and sum."""

    def __init__(self, kind: str = "exp over sum"):
        super().__init__()
        self.kind = kind

    def weights(self, s):
        e = (s - s.amax(-1, keepdim=True)).exp()
        return {
            "exp over sum": lambda: torch.exp(s) / torch.exp(s).sum(-1, keepdim=True),
            "less the largest": lambda: torch.div(e, e.sum(dim=-1, keepdim=True)),
            "log_softmax": lambda: nn.functional.log_softmax(s, -1).exp(),
            "logsumexp": lambda: torch.exp(s - s.logsumexp(-1, keepdim=True)),
            "in place": lambda: e.div_(e.sum(-1, keepdim=True)),
            "times the inverse": lambda: e * e.sum(-1, keepdim=True).reciprocal(),
            "normalize": lambda: nn.functional.normalize(e, p=1, dim=-1),
            "heads in the batch": lambda: self.flat(s),
        }[self.kind]()

    def flat(self, s):
        e = s.flatten(0, 1).exp()
        return (e / e.sum(-1, keepdim=True)).unflatten(0, s.shape[:2])

    def forward(self, x):
        q, k, v = (split(each, HEADS) for each in self.qkv(x).chunk(3, -1))
        scores = self.turned(q) @ self.turned(k).mT / math.sqrt(EACH)
        return self.proj(joined(self.weights(scores) @ v))


class ByEntry(Parameters):
    """The first entries of all heads come before their second entries, (d_head head)."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        del self.W_q, self.W_k, self.W_v

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (EACH, HEADS)).movedim(-1, 1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj((torch.softmax(q @ k.mT, -1) @ v).movedim(1, -1).flatten(-2))


class WithSink(LinearAttention):
    """A softmax with one more key, whose score is 0 and which has no value."""

    def forward(self, x):
        q, k, v = (split(part(x), HEADS) for part in (self.to_q, self.to_k, self.to_v))
        scores = nn.functional.pad(q @ k.mT, (1, 0))
        return self.to_out(joined(torch.softmax(scores, -1)[..., 1:] @ v))


class Differential(Parameters):
    """Two softmaxes for each head, the second one subtracted."""

    def __init__(self):
        super().__init__()
        self.W_q, self.W_k = (nn.Parameter(torch.randn(2 * HEADS, WIDTH, EACH)) for _ in range(2))

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, W) for W in (self.W_q, self.W_k, self.W_v))
        both = torch.softmax(q @ k.mT, dim=-1)
        return self.o_proj(joined((both[:, ::2] - 0.3 * both[:, 1::2]) @ v))

    def pattern(self, x, head):
        first, second = (
            torch.softmax((x @ self.W_q[each]) @ (x @ self.W_k[each]).mT, -1)
            for each in (2 * head, 2 * head + 1)
        )
        return first - 0.3 * second


class Layer(nn.Module):
    """A layer with a norm before its attention and an MLP."""

    def __init__(self, attention: nn.Module, norm: bool = False):
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)

    def by_hand(self, x, masked=()):
        heads = [head for head in range(HEADS) if head not in masked]
        read = self.norm(x)
        x = x + sum((self.attention.written(read, head) for head in heads), torch.zeros_like(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Blocks that run several times, one after another, between a read-in and a read-out."""

    def __init__(self, *attentions: nn.Module, runs: int = 1, d_token: int = 4, norm: bool = False):
        super().__init__()
        self.read_in = nn.Linear(d_token, WIDTH)
        self.blocks = nn.ModuleList(Layer(each, norm) for each in attentions)
        self.runs, self.read_out = runs, nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.read_in(x)
        for _ in range(self.runs):
            for block in self.blocks:
                x = block(x)
        return self.read_out(x)

    def by_hand(self, tokens, mask=(), seen=None):
        """The prediction without the heads of a mask, (layer, head); streams before each layer go to `seen`."""
        x, layer = self.read_in(tokens), 0
        for _ in range(self.runs):
            for block in self.blocks:
                if seen is not None:
                    seen.append(x)
                x = block.by_hand(x, [head for at, head in mask if at == layer])
                layer += 1
        return self.read_out(x)[:, -1]


def random(module: nn.Module) -> nn.Module:
    """The module in float64, with weights N(0, 0.5^2)."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.requires_grad_(False)
