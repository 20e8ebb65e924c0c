"""Modules of other people's architectures in plain PyTorch, and their predictions head by head, computed by other code."""

import math

import torch
from torch import nn

WIDTH, HEADS = 8, 4
EACH = WIDTH // HEADS


attend = nn.functional.scaled_dot_product_attention


def split(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def joined(z: torch.Tensor) -> torch.Tensor:
    return z.transpose(1, 2).flatten(-2)


def rows(head: int) -> slice:
    return slice(head * EACH, (head + 1) * EACH)


def linear(outputs: int = WIDTH, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, bias=bias)


class Attention(nn.Module):
    """Attention head by head, from the parts of a head: W_q, W_k, W_v [width, d_head] and W_o [d_head, width]."""

    causal, scale = False, 1 / math.sqrt(EACH)

    def pattern(self, x, head):
        W_q, W_k, *_ = self.parts(head)
        scores = (x @ W_q) @ (x @ W_k).mT * self.scale
        later = torch.full(scores.shape[-2:], -math.inf).triu(1)
        return torch.softmax(scores + later if self.causal else scores, -1)

    def written(self, x, head):
        *_, W_v, W_o = self.parts(head)
        return self.pattern(x, head) @ (x @ W_v) @ W_o


class Grouped(Attention):
    """Four query heads that share two heads of keys and values; causal, by hand or by the fused function, which takes
    "is_causal" or a "boolean" or "additive" mask."""

    groups, causal = 2, True

    def __init__(self, fused: str = ""):
        super().__init__()
        self.n_heads, self.fused = HEADS, fused
        self.q_proj, self.o_proj = linear(), linear()
        self.k_proj, self.v_proj = linear(self.groups * EACH), linear(self.groups * EACH)

    def forward(self, x):
        q = split(self.q_proj(x), HEADS)
        k, v = split(self.k_proj(x), self.groups), split(self.v_proj(x), self.groups)
        added = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1).to(x)
        if self.fused:
            mask = {"boolean": added == 0, "additive": added}.get(self.fused)
            z = attend(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        else:
            k, v = (each.repeat_interleave(HEADS // self.groups, dim=1) for each in (k, v))
            z = (q @ k.mT / math.sqrt(EACH) + added).softmax(-1) @ v
        return self.o_proj(joined(z))

    def parts(self, head):
        own, shared = rows(head), rows(head // (HEADS // self.groups))
        W_k, W_v = self.k_proj.weight[shared].T, self.v_proj.weight[shared].T
        return self.q_proj.weight[own].T, W_k, W_v, self.o_proj.weight[:, own].T


class ContextKeys(Grouped):
    """Shared keys and values of the context alone: the last token is cut off."""

    causal = False

    def forward(self, x):
        q = split(self.q_proj(x), HEADS)
        k, v = split(self.k_proj(x), self.groups), split(self.v_proj(x), self.groups)
        k, v = (part[:, :, :-1].repeat_interleave(HEADS // self.groups, dim=1) for part in (k, v))
        return self.o_proj(joined((q @ k.mT / math.sqrt(EACH)).softmax(-1) @ v))

    def pattern(self, x, head):
        W_q, W_k, *_ = self.parts(head)
        return torch.softmax((x @ W_q) @ (x[:, :-1] @ W_k).mT * self.scale, -1)

    def written(self, x, head):
        *_, W_v, W_o = self.parts(head)
        return self.pattern(x, head) @ (x[:, :-1] @ W_v) @ W_o


class LinearAttention(Attention):
    """No softmax: q.k over the number of pairs; `strict` reads earlier tokens only."""

    def __init__(self, strict: bool = False):
        super().__init__()
        self.n_heads, self.strict = HEADS, strict
        self.to_q, self.to_k, self.to_v, self.to_out = (linear() for _ in range(4))

    def forward(self, x):
        q, k, v = (split(part(x), HEADS) for part in (self.to_q, self.to_k, self.to_v))
        if not self.strict:  # as a state of keys and values, without a matrix of weights
            return self.to_out(joined(q @ (k.mT @ v)) / (x.shape[1] - 1))
        return self.to_out(joined((q @ k.mT).tril(-1) @ v) / (x.shape[1] - 1))

    def parts(self, head):
        own = rows(head)
        reads = (part.weight[own].T for part in (self.to_q, self.to_k, self.to_v))
        return (*reads, self.to_out.weight[:, own].T)

    def pattern(self, x, head):
        W_q, W_k, *_ = self.parts(head)
        products = (x @ W_q) @ (x @ W_k).mT
        return (products.tril(-1) if self.strict else products) / (x.shape[1] - 1)


class Torchs(Attention):
    """torch.nn.MultiheadAttention under a mask: a boolean one batch first, an additive one positions first."""

    causal = True

    def __init__(self, batch_first: bool = True):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=batch_first)

    def forward(self, x):
        x = x if self.mha.batch_first else x.transpose(0, 1)
        length = x.shape[self.mha.batch_first]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        if not self.mha.batch_first:
            mask = torch.zeros(length, length).to(x).masked_fill(mask, -math.inf)
        output = self.mha(x, x, x, attn_mask=mask)[0]
        return output if self.mha.batch_first else output.transpose(0, 1)

    def parts(self, head):
        reads = (W[rows(head)].T for W in self.mha.in_proj_weight.chunk(3))
        return (*reads, self.mha.out_proj.weight[:, rows(head)].T)


class Rotary(Attention):
    """Queries and keys turned by their position, in one packed projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = linear(3 * WIDTH), linear()

    def turned(self, x):
        angle = torch.arange(x.shape[-2], dtype=x.dtype)
        first = x[..., 0] * angle.cos() - x[..., 1] * angle.sin()
        return torch.stack([first, x[..., 0] * angle.sin() + x[..., 1] * angle.cos()], -1)

    def forward(self, x):
        q, k, v = (split(each, HEADS) for each in self.qkv(x).chunk(3, -1))
        return self.proj(joined(attend(self.turned(q), self.turned(k), v)))

    def parts(self, head):
        reads = (W[rows(head)].T for W in self.qkv.weight.chunk(3))
        return (*reads, self.proj.weight[:, rows(head)].T)

    def pattern(self, x, head):
        W_q, W_k, *_ = self.parts(head)
        q, k = self.turned(x @ W_q), self.turned(x @ W_k)
        return torch.softmax(q @ k.mT * self.scale, -1)


class Parameters(Attention):
    """Queries, keys and values made by parameters; the output projection is a module."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        sizes = (HEADS, WIDTH, EACH)
        self.W_q, self.W_k, self.W_v = (nn.Parameter(torch.randn(sizes)) for _ in range(3))
        self.o_proj = linear()

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, W) for W in (self.W_q, self.W_k, self.W_v))
        pattern = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), dim=-1)
        return self.o_proj(joined(torch.einsum("bhqk,bhkd->bhqd", pattern, v)))

    def parts(self, head):
        reads = (W[head] for W in (self.W_q, self.W_k, self.W_v))
        return (*reads, self.o_proj.weight[:, rows(head)].T)


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (linear(EACH) for _ in "qkv")

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / math.sqrt(WIDTH)
        later = torch.full(scores.shape[-2:], -math.inf).triu(1)
        return torch.softmax(scores + later, -1) @ self.value(x)


class Heads(Attention):
    """Each head a module of its own, with its own softmax over the root of the stream's width."""

    def __init__(self):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(OneHead() for _ in range(HEADS)), linear()

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], -1))

    def written(self, x, head):
        return self.heads[head](x) @ self.proj.weight[:, rows(head)].T


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
        self.q_proj, self.k_proj, self.v_proj = (linear() for _ in "qkv")
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
