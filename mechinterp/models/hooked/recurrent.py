"""Hooked heads of a recurrent layer: gates and states have hook points too."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechinterp.config.model import gate_shapes
from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.config import zeros
from mechinterp.models.recurrence import Memory, memory_of, written_before


class RecurrentAttention(Attention):
    """Heads that write the tokens into a state, one after the other, and read it (`mechinterp.models.recurrence`).

    `hook_pattern` has the exact attention pattern A, z = A v, so that whatever reads or changes attention weights does so
    here too. A change of the state after token t at `hook_state` passes on to the states of later tokens.
    """

    def _add_weights(self) -> None:
        super()._add_weights()
        shapes = gate_shapes(self.cfg.model, self.cfg.d_model, self.cfg.d_head)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(zeros(*shape)))

    def _add_hooks(self) -> None:
        super()._add_hooks()
        del self.hook_attn_scores
        if hasattr(self, "b_gate"):
            self.hook_gate = HookPoint()  # [batch, pos, head]
        if hasattr(self, "b_beta"):
            self.hook_beta = HookPoint()  # [batch, pos, head]
        self.hook_state = HookPoint()  # [batch, pos, head, d_head, d_head], after each token

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], norm: nn.Module | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Sum of the heads' outputs. If a norm is given, the heads read the residual stream through it."""
        q, k, v, for_k = self._projections(resid, norm)
        q = self.cfg.scale * q
        memory = self._memory(k, v, for_k)
        n_written = written_before(resid.shape[1], self.cfg.model)
        pattern = self.hook_pattern(memory.pattern(q, n_written))
        z = torch.einsum("bhrk,bkhv->brhv", pattern, v)
        changes = self._changes(memory)
        if changes is not None:
            z = z + torch.einsum(
                "brhd,brhdv->brhv", q, changes[:, n_written.start : n_written.stop]
            )
        return self._write(self.hook_z(z))

    def _memory(self, k: Tensor, v: Tensor, read: Tensor) -> Memory:
        """Memory of the layer, with the gates as the hooks return them."""
        memory = memory_of(self.cfg.model.score, k, v, read, dict(self.named_parameters()))
        gates: dict[str, Tensor] = {}
        for name in ("gate", "beta"):
            own = getattr(memory, name)
            if own is not None:
                # One copy per prompt, so that a hook may edit the gates of one prompt in place.
                gates[name] = getattr(self, f"hook_{name}")(own.repeat(len(k) // len(own), 1, 1))
        return Memory(memory.rule, k, v, gates.get("gate"), gates.get("beta"), memory.ridge)

    def _changes(self, memory: Memory) -> Tensor | None:
        """Changes of the states after 0, 1, ... tokens that hooks on the state make; None if it has no hooks.

        Where a hook sets the state, it is that; elsewhere the change of the state before is passed on.
        """
        point = self.hook_state
        if not (point._forward_hooks or point._backward_hooks):
            return None
        n_keys = memory.k.shape[1]
        own = memory.states(range(1, n_keys + 1))
        given = point(own.clone())
        added = given - own
        is_set = (added.detach() != 0).any((-2, -1), keepdim=True)
        steps = memory.steps()
        changes = [torch.zeros_like(own[:, 0])]
        for at in range(n_keys):
            passed = steps[:, at] @ changes[-1]
            changes.append(added[:, at] + passed.masked_fill(is_set[:, at], 0))
        return torch.stack(changes, 1)
