"""Expected Attention: prompt tokens by the attention that coming queries are expected to pay."""

import torch

from foveate.methods import About, Channel, KeepsByScore, register, setting


@register
class ExpectedAttention(KeepsByScore):
    """The prompt tokens that normally distributed queries at the next positions would attend to, times their values'
    norms; each generated token is kept. The moments are taken of the queries of the prompts so far, before rotation."""

    name = "expected_attention"
    about = About(
        "Expected Attention, Devoto et al. 2025, arXiv:2510.00636", small_budget={"top_k": 20}, estimates=True
    )
    needs_rotary = True
    window, min_k = 0, 0
    future = 512
    """Number of positions after the prompt at which queries are expected."""

    top_k: int | float = setting(0.5, "prompt tokens kept, sinks included: a number, or a share of the prompt")

    def channels(self, geometry):
        heads, dim = geometry.num_heads, geometry.head_dim
        shapes = {"number": (1, 1), "sum": (heads, dim), "products": (heads, dim, dim)}
        return {name: Channel(shape, per=0) for name, shape in shapes.items()}

    def observe(self, cache, q, attended, scaling):
        positions = cache.positions[:, :1, -q.shape[2] :]
        counted = (positions >= self.sinks)[..., None]
        q = cache.rotary.remove(q, positions) * counted
        for name, new in {"number": counted.sum(2), "sum": q.sum(2), "products": q.mT @ q}.items():
            cache.channel(name).add_(new)

    def scores(self, cache, scaling):
        number, turn = cache.channel("number"), lambda x: cache.rotary.mean(x, cache.lengths[0], self.future)
        mean, groups = cache.channel("sum") / number, (cache.geometry.num_kv_heads, -1)
        cov = cache.channel("products") / number[..., None] - mean[..., None] * mean[:, :, None]
        mean, cov = turn(mean)[..., None].unflatten(1, groups), turn(turn(cov).mT).unflatten(1, groups)
        logits = []
        for keys in cache.keys.float()[:, :, None].split(4096, 3):  # bounds the memory
            logits.append(scaling * (keys @ mean)[..., 0] + scaling**2 / 2 * ((keys @ cov) * keys).sum(-1))
        logits = torch.cat(logits, -1).masked_fill((cache.positions < self.sinks)[:, :, None], -torch.inf)
        return logits.softmax(-1).mean(2) * cache.values.float().norm(dim=-1)
