"""A Gated DeltaNet layer (Yang et al. 2024, arXiv:2412.06464), as laLTE's models have it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.hybrids.ops.recur import gated_delta_rule
from foveate.hybrids.state import Packing, RecurrentMemory

CONV_SIZE = 4
"""Tokens that the short convolution sees."""


class GatedDeltaNet(nn.Module):
    """Projections, a short convolution, the gated delta rule, a gated norm.

    Args:
        hidden_size: width of the model.
        num_heads: heads of the rule.
        head_dim: dimensions of a query, a key or a value.
        eps: of the norm.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, eps: float = 1e-6):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        width = num_heads * head_dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * width, bias=False)
        self.gates_proj = nn.Linear(hidden_size, 2 * num_heads, bias=False)
        self.out_gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.conv = nn.Parameter(torch.empty(CONV_SIZE, 3 * width))
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.step_bias = nn.Parameter(torch.empty(num_heads))
        self.norm = nn.RMSNorm(head_dim, eps=eps)
        self.reset_gates()

    @torch.no_grad()
    def reset_gates(self) -> None:
        """Draw the convolution and the decay as Mamba 2 does: rates in (0, 16), steps from 0.001 to 0.1."""
        bound = CONV_SIZE**-0.5
        self.conv.uniform_(-bound, bound)
        self.log_rate.uniform_(1e-4, 16).log_()
        step = torch.empty_like(self.step_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.step_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, hidden: Tensor, memory: RecurrentMemory | None = None, packing: Packing | None = None) -> Tensor:
        """``[B, L, hidden_size]`` to the same, after what the memory has read.

        Args:
            packing: of a padded batch, whose ``hidden`` it has packed.
        """
        inputs = {"x": self.qkv_proj(hidden), "gates": self.gates_proj(hidden)}
        if packing is not None:
            inputs["real"] = packing.real
        out = self._remember(inputs, memory, packing) if memory is not None else self._read(inputs, {})[0]
        gate = self.out_gate_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim))
        out = self.norm(out.transpose(1, 2)) * F.silu(gate)
        return self.o_proj(out.flatten(2).to(hidden.dtype))

    def _remember(self, inputs: dict[str, Tensor], memory: RecurrentMemory, packing: Packing | None) -> Tensor:
        """Heads' outputs ``[B, H, L, Dv]`` for new inputs, which follow the tokens in the memory."""
        length = inputs["x"].shape[1]
        if not memory.lengths:
            memory.lengths = [0] * inputs["x"].shape[0]
        if staged := memory.settled():
            memory.tensors = self._read(staged, memory.tensors)[1]
        first = memory.final_part(length, packing)  # tokens that cannot be undone
        outs = []
        if first:
            out, memory.tensors = self._read({name: x[:, :first] for name, x in inputs.items()}, memory.tensors)
            outs.append(out)
        if first < length:
            memory.stage({name: x[:, first:] for name, x in inputs.items()})
            outs.append(self._read(memory.staged, memory.tensors)[0][:, :, first - length :])
        memory.advance(length, packing)
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]

    def _read(self, inputs: dict[str, Tensor], before: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Heads' outputs and what is to be remembered, from the inputs and what was remembered."""
        x, real = inputs["x"], inputs.get("real")
        if real is not None:
            x = x * real[..., None]
        tail = before.get("tail")
        if tail is None:
            tail = x.new_zeros(x.shape[0], CONV_SIZE - 1, x.shape[2])
        x = torch.cat([tail, x], 1)
        length = x.shape[1] - CONV_SIZE + 1
        mixed = sum(x[:, i : i + length] * self.conv[i].to(x.dtype) for i in range(CONV_SIZE))
        q, k, v = (self._heads(part) for part in F.silu(mixed).chunk(3, -1))
        step, beta = inputs["gates"].float().transpose(1, 2).chunk(2, 1)
        log_decay = -self.log_rate.float().exp()[:, None] * F.softplus(step + self.step_bias.float()[:, None])
        beta = beta.sigmoid()
        if real is not None:  # padding neither decays nor writes
            log_decay, beta = log_decay * real[:, None], beta * real[:, None]
        out, state = gated_delta_rule(q, k, v, log_decay, beta, state=before.get("state"))
        if real is None:
            tail = x[:, length:].clone()  # a view would keep the whole sequence
        else:
            last = real.sum(1)[:, None] + torch.arange(CONV_SIZE - 1, device=x.device)
            tail = x.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
        return out, {"tail": tail, "state": state}

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
