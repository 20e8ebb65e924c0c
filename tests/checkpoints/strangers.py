"""Models that a stranger writes and trains in plain PyTorch, which share no code with the package."""

from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.prompts import Prompts

D_X, LENGTH = 2, 8
TASK = {"context_length": LENGTH, "noise_var": 0.01, "beta_var": 1.0}


@dataclass(frozen=True)
class Kind:
    """What a stranger's model is made of."""

    layers: int = 1
    heads: int = 2
    width: int = 16
    layout: str = "pairs"
    positions: str = "none"
    """none, learned, sines (all before the cosines), waves (in turn), halves or adjacent (rotary)."""
    norm: str = "none"
    """none; layer, rms or bare (without weights) before attention and MLP, and before the read-out; after, each sum."""
    mlp: bool = False
    activation: str = "gelu"
    scale: str = "head"
    """head or width: the width whose inverse root is the factor on the scores."""
    parallel: bool = False
    """Whether the MLP reads what attention reads, and both are added."""
    passes: int = 1
    base: float = 10000.0
    beside: str = "none"
    """none; alibi: a slope times the distance is taken from the scores; sink: the softmax has one more logit, which is 0;
    softcap: scores are bent to lie within 2."""
    bias: bool = False
    """Whether attention has biases."""
    read_mlp: bool = False
    """Whether two layers read tokens in."""
    steps: int = 600
    seed: int = 0


def turned(x: Tensor, kind: Kind) -> Tensor:
    """Rotary positions as complex numbers, [batch, head, pos, d_head]."""
    n = x.shape[-1]
    turns = kind.base ** (-torch.arange(0, n, 2) / n)
    angle = torch.polar(torch.ones(1), torch.arange(x.shape[2])[:, None] * turns)
    if kind.positions == "adjacent":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angle).flatten(-2)
    both = torch.complex(x[..., : n // 2], x[..., n // 2 :]) * angle
    return torch.cat([both.real, both.imag], -1)


def weighted(scores: Tensor, beside: str) -> Tensor:
    """Attention with ALiBi (Press et al. 2022) or with a logit 0 beside the scores (softmax1)."""
    n_heads, n = scores.shape[1:3]
    if beside == "alibi":
        slopes = 2.0 ** (-8 * torch.arange(1, n_heads + 1) / n_heads)
        scores = scores + slopes[:, None, None] * (torch.arange(n) - torch.arange(n)[:, None])
    if beside == "softcap":
        scores = 2 * torch.tanh(scores / 2)
    scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    if beside == "sink":
        return F.pad(scores, (0, 1)).softmax(-1)[..., :-1]
    return scores.softmax(-1)


NORMS = {
    "layer": nn.LayerNorm,
    "after": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "bare": partial(nn.LayerNorm, elementwise_affine=False),
}
ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}


class Block(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, n = kind, kind.width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(n, n, bias=kind.bias) for _ in "qkvo"
        )
        made = NORMS.get(kind.norm)
        self.norm1 = nn.Identity() if made is None else made(n)
        self.norm2 = nn.Identity() if made is None or not kind.mlp else made(n)
        self.mlp = nn.Sequential(nn.Linear(n, 2 * n), ACTIVATIONS[kind.activation](), nn.Linear(2 * n, n)) if kind.mlp else None  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        after = self.kind.norm == "after"
        read = x if after else self.norm1(x)
        q, k, v = (
            p(read).unflatten(-1, (self.kind.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.kind.positions in ("halves", "adjacent"):
            q, k = turned(q, self.kind), turned(k, self.kind)
        scale = (x if self.kind.scale == "width" else q).shape[-1] ** -0.5
        if self.kind.beside == "none":
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            z = weighted(scale * q @ k.mT, self.kind.beside) @ v
        written = self.o_proj(z.transpose(1, 2).flatten(2))
        if self.kind.parallel and self.mlp is not None:
            return x + written + self.mlp(self.norm2(x))
        x = self.norm1(x + written) if after else x + written
        if self.mlp is None:
            return x
        return self.norm2(x + self.mlp(x)) if after else x + self.mlp(self.norm2(x))


class Stranger(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        n_pos = LENGTH + 1 if kind.layout == "pairs" else 2 * LENGTH + 1
        d_token = D_X + (kind.layout == "pairs")
        self.read_in: nn.Module = nn.Linear(d_token, kind.width)
        if kind.read_mlp:
            activation = ACTIVATIONS[kind.activation]()
            self.read_in = nn.Sequential(
                nn.Linear(d_token, 5), activation, nn.Linear(5, kind.width)
            )
        if kind.positions == "learned":
            self.pos_emb = nn.Embedding(n_pos, kind.width)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(kind.layers))
        made = NORMS.get(kind.norm)
        self.final_norm = (
            nn.Identity() if made is None or kind.norm == "after" else made(kind.width)
        )
        self.read_out = nn.Linear(kind.width, 1)

    def forward(self, x: Tensor, y: Tensor, x_query: Tensor) -> Tensor:
        """The prediction at the query, [batch]; y of shape [batch, L]."""
        if self.kind.layout == "pairs":
            context = torch.cat([x, y[..., None]], -1)
            tokens = torch.cat([context, F.pad(x_query, (0, 1))[:, None]], 1)
        else:
            wide = F.pad(y[..., None], (0, D_X - 1))
            tokens = torch.stack([x, wide], 2).flatten(1, 2)
            tokens = torch.cat([tokens, x_query[:, None]], 1)
        stream = self.read_in(tokens)
        if self.kind.positions == "learned":
            stream = stream + self.pos_emb.weight
        if self.kind.positions in ("sines", "waves"):
            turns = 10000.0 ** (-torch.arange(0, self.kind.width, 2) / self.kind.width)
            angle = torch.arange(stream.shape[1])[:, None] * turns
            both = torch.stack(
                [angle.sin(), angle.cos()], 1 if self.kind.positions == "sines" else 2
            )
            stream = stream + both.flatten(1)
        for _ in range(self.kind.passes):
            for block in self.blocks:
                stream = block(stream)
        return self.read_out(self.final_norm(stream))[:, -1, 0]


def drawn(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(count, LENGTH + 1, D_X, generator=generator)
    beta = torch.randn(count, D_X, generator=generator)
    noise = 0.1 * torch.randn(count, LENGTH + 1, generator=generator)
    y = (x * beta[:, None]).sum(-1) + noise
    return x[:, :-1], y[:, :-1], x[:, -1], y[:, -1]


def some_prompts() -> Prompts:
    """64 prompts."""
    x, y, x_query, target = drawn(64, torch.Generator().manual_seed(3))
    column = target[:, None]
    return Prompts(x, y[..., None], x_query, column, column, torch.zeros(64, D_X, 1))


def prediction(checkpoint: Checkpoint, model: Stranger) -> tuple[Tensor, Tensor]:
    """Predictions of what was read and of the stranger's own module, on the same prompts."""
    prompts = some_prompts()
    with torch.no_grad():
        theirs = model(prompts.x, prompts.y[..., 0], prompts.x_query)
        return checkpoint.model.predict(prompts)[:, 0], theirs


@cache
def trained(kind: Kind) -> Stranger:
    """A model of this kind after a short training."""
    with torch.random.fork_rng():
        torch.manual_seed(kind.seed)
        model = Stranger(kind)
    generator = torch.Generator().manual_seed(1 + kind.seed)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(kind.steps):
        *prompt, target = drawn(128, generator)
        loss = (model(*prompt) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def random_weights(kind: Kind) -> Stranger:
    """A model of this kind with weights N(0, 0.4^2)."""
    model, generator = Stranger(kind), torch.Generator().manual_seed(kind.seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model.eval().requires_grad_(False)


def joins(kind: Kind) -> dict[str, object]:
    """What its file does not show, as the reader says it (`model=`)."""
    rotary = kind.positions in ("halves", "adjacent")
    positions = {"sines": "sinusoidal_halves", "waves": "sinusoidal", "none": "none"} | dict.fromkeys(("halves", "adjacent"), "rotary")  # fmt: skip
    said = {"layout": kind.layout, "context_keys": False, "residual": True, "passes": kind.passes}
    said |= {"norm": {"none": "none", "after": "after"}.get(kind.norm, "before")}
    said |= {"rms_norm": kind.norm == "rms"} if kind.norm in ("rms", "bare") else {}
    said |= {"activation": kind.activation} if kind.mlp or kind.read_mlp else {}
    said |= {"positions": positions[kind.positions]} if kind.positions != "learned" else {}
    said |= {"rotary_base": kind.base, "rotary_adjacent_pairs": kind.positions == "adjacent"} if rotary else {}  # fmt: skip
    return said


SPELLINGS = {
    spelling: dict(pair.split("=") for pair in pairs.split())
    for spelling, pairs in {
        "its own": "",
        "minGPT": "q_proj=attn.query k_proj=attn.key v_proj=attn.value o_proj=attn.proj qkv=attn.c_attn norm1=ln1 norm2=ln2 final_norm=ln_f",
        "nanoGPT": "blocks=transformer.h o_proj=attn.c_proj mlp.0=mlp.c_fc norm1=ln_1 norm2=ln_2 mlp.2=mlp.c_proj final_norm=transformer.ln_f qkv=attn.c_attn pos_emb=transformer.wpe read_=_read_",
        "encoder": "blocks=layers q_proj=self_attn.q_proj k_proj=self_attn.k_proj v_proj=self_attn.v_proj o_proj=self_attn.o_proj mlp.0=linear1 qkv=self_attn.qkv mlp.2=linear2 final_norm=norm pos_emb.weight=pos_embedding",
    }.items()
}  # fmt: skip
"""Words of names, and what other code calls them."""


def spelled(state: dict[str, Tensor], spelling: str, *, packed: bool, conv1d: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """The state dict under other names; queries, keys and values in one matrix; matrices in layers [in, out]."""
    state = dict(state)
    for name in [name for name in state if packed and "q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        state[name.replace("q_proj", "qkv")] = torch.cat(parts)
    if conv1d:
        state = {
            n: t.T.contiguous() if "blocks" in n and t.ndim == 2 else t for n, t in state.items()
        }
    renamed = {}
    for name, tensor in state.items():
        for own, other in SPELLINGS[spelling].items():
            name = name.replace(own, other)
        renamed[name] = tensor[None] if name == "pos_embedding" else tensor
    return renamed


def scanned(state: dict[str, Tensor], n_layers: int, *, heads: bool) -> dict[str, Tensor]:
    """The layers' tensors side by side on a first axis, with flax's names and axes."""
    tree = {}
    for name, tensor in state.items():
        if name == "pos_emb.weight":
            tree["pos_emb.embedding"] = tensor
        elif not name.startswith("blocks."):
            tree[name.replace("weight", "kernel")] = tensor.mT if tensor.ndim == 2 else tensor
        elif name.startswith("blocks.0."):
            rest = name.removeprefix("blocks.0.")
            stack = torch.stack([state[f"blocks.{n}.{rest}"] for n in range(n_layers)])
            stack = stack.mT if stack.ndim == 3 else stack
            if heads and "_proj.weight" in rest:
                stack = stack.unflatten(1 if "o_proj" in rest else 2, (2, -1))
            kind = "scale" if "norm" in rest else "kernel"
            rest = rest.replace("mlp.0", "mlp.Dense_0").replace("mlp.2", "mlp.Dense_1")
            tree["ScanBlock_0." + rest.replace("weight", kind)] = stack
    named = {name.replace("final_norm.kernel", "final_norm.scale"): t for name, t in tree.items()}
    return {name: tensor.contiguous() for name, tensor in named.items()}
