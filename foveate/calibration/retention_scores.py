"""Scores of a token's worth to later queries, from its key, its value and its neighbours (laLTE, section 3.1)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate import ops


class RetentionScores(nn.Module):
    """The probability that a token is worth retaining, for each KV head on its own.

    Three convolutions over time, of kernel 3 and dilation 2, read the keys before rotation and the values of 13 tokens,
    six of them later ones; each halves the channels. The last bias starts at 0.5, so everything is retained at first.

    Args:
        num_kv_heads: heads.
        dim: dimensions of a key and its value together, a multiple of 8.
        kind: "conv"; or "mlp", two layers that see one token alone (the paper's LTE-MLP).
        dropout: share of the channels that training drops.
        dropout_at: "input" of every convolution, as the published code does; or "output" of every activation, as the
            paper has it.
        cap: of the scores before the sigmoid, ``cap * tanh(x / cap)``, so that they cannot saturate; None: none. Ours.
    """

    def __init__(
        self,
        num_kv_heads: int,
        dim: int,
        kind: str = "conv",
        dropout: float = 0.1,
        dropout_at: str = "input",
        cap: float | None = None,
    ):
        super().__init__()
        if kind not in ("conv", "mlp"):
            raise ValueError(f"kind must be conv or mlp, not {kind!r}")
        if dropout_at not in ("input", "output"):
            raise ValueError(f"dropout_at must be input or output, not {dropout_at!r}")
        if dim % 8:
            raise ValueError(f"a key and its value must have a multiple of 8 dimensions together, not {dim}")
        if cap is not None and not cap > 0:
            raise ValueError(f"cap must be above 0 or None, not {cap}")
        self.cap = cap
        self.num_kv_heads, self.kind, self.dropout, self.dropout_at = num_kv_heads, kind, dropout, dropout_at
        self.kernel = 3 if kind == "conv" else 1
        widths = [dim, dim // 2, dim // 4, dim // 8] if kind == "conv" else [dim, dim // 2]
        how = {"kernel_size": self.kernel, "dilation": 2, "padding": self.kernel - 1, "groups": num_kv_heads}
        self.convs = nn.ModuleList(
            nn.Conv1d(num_kv_heads * wide, num_kv_heads * narrow, **how) for wide, narrow in itertools.pairwise(widths)
        )
        self.head = nn.Conv1d(num_kv_heads * widths[-1], num_kv_heads, 1, groups=num_kv_heads)
        self.reset()

    @property
    def reach(self) -> int:
        """A token's score depends on this many tokens after it and on equally many before it."""
        return (self.kernel - 1) * len(self.convs)

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the weights anew."""
        for conv in (*self.convs, self.head):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            conv.bias.zero_()
        self.head.bias.fill_(0.5)

    def forward(self, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """fp32 ``[B, Hkv, L]`` in (0, 1).

        Inference takes scores without the cap (:meth:`of_cached`), which changes neither their order nor the side of
        the threshold.

        Args:
            k: ``[B, Hkv, L, D]``, before rotation.
            v: ``[B, Hkv, L, Dv]``.
            real: bool ``[B, L]``: True where a token is. Places before the first token are zero in every layer.
        """
        return self.probabilities(self.logits(k, v, real))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Scores in (0, 1), from scores before cap and sigmoid."""
        return (logits if self.cap is None else self.cap * (logits / self.cap).tanh()).sigmoid()

    def logits(self, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """Scores before cap and sigmoid, fp32 ``[B, Hkv, L]``. The arguments are those :meth:`forward` takes.

        A convolution is one matrix product of the tokens with the weights of all taps, whose three results are then
        shifted and summed. A convolution halves the channels, so this moves half the bytes that gathering three tokens
        before the product would move. cuDNN's grouped convolutions are several times slower.
        """
        x = torch.cat([k.transpose(0, 1), v.transpose(0, 1)], -1).to(self.head.weight.dtype)  # [Hkv, B, L, channels]
        mask = None if real is None else real[:, :, None].to(x.dtype)
        x = x if mask is None else x * mask
        for conv in self.convs:
            if self.dropout_at == "input":
                x = F.dropout(x, self.dropout, self.training)
            x = self._convolve(conv, x)
            x = F.silu(x if mask is None else x * mask)
            if self.dropout_at == "output":
                x = F.dropout(x, self.dropout, self.training)
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.head.weight.view(len(x), 1, 1, -1).to(exact), self.head.bias.view(-1, 1, 1).to(exact)
        return ((x.to(exact) * weight).sum(-1) + bias).transpose(0, 1).float()

    @torch.no_grad()
    def of_cached(
        self,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        real: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Scores of tokens as a cache has them: fp32 ``[B, Hkv, L]`` without dropout and without gradients.

        Args:
            k: ``[B, Hkv, S, D]``, rotated by ``angles``.
            v: ``[B, Hkv, S, Dv]``.
            angles: of the tokens, see :meth:`foveate.hybrids.layers.rotary.Rotary.angles`; None: keys before rotation.
            real: bool ``[B, L]``: where there is a token.
            slots: int64 ``[B, L]``: where in ``k`` and ``v`` the tokens are; None: ``L = S`` tokens in order.
        """
        convolutions = [self._by_head(conv) for conv in self.convs]
        head, dilation = self._by_head(self.head), self.convs[0].dilation[0]
        how = {"dilation": dilation, "real": real, "slots": slots, "angles": angles}
        return ops.score.retention_logits(k, v, convolutions, head, **how).sigmoid()

    def _by_head(self, conv: nn.Conv1d) -> ops.score.Convolution:
        heads = self.num_kv_heads
        return ops.score.Convolution(
            conv.weight.unflatten(0, (heads, -1)).permute(0, 3, 2, 1), conv.bias.view(heads, -1)
        )

    def _convolve(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        """Each head's convolution over time: ``[Hkv, B, L, channels]`` to half the channels."""
        heads, batch, length, _ = x.shape
        weight = conv.weight.unflatten(0, (heads, -1)).permute(0, 2, 3, 1)  # [Hkv, channels, taps, half the channels]
        if torch.is_grad_enabled():  # one product for each row, so that the weights' gradient is a sum over the rows
            products = x @ weight.flatten(2)[:, None]
        else:
            products = (x.flatten(1, 2) @ weight.flatten(2)).unflatten(1, (batch, length))
        taps = products.unflatten(-1, weight.shape[2:]).unbind(3)
        bias = conv.bias.view(heads, 1, 1, -1).to(products.dtype)  # autocast keeps it in fp32
        if len(taps) == 1:
            return taps[0] + bias
        before, own, after = taps
        step = min(conv.dilation[0], length)
        return F.pad(before, (0, 0, step, -step)) + own + F.pad(after, (0, 0, -step, step)) + bias
