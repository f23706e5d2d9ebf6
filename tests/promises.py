"""What settings promise: tokens that are read whatever their attention, and contexts so short that they are dense."""

from collections.abc import Iterable

from foveate.methods import KeepsByScore, Method, get
from foveate.methods.budgets import budget
from foveate.methods.pages import PageMethod

BASES = {
    "locks": lambda m, prompt, n: [*range(m.page_size), *range(n // m.page_size * m.page_size, n)],
    "streaming": lambda m, prompt, n: [*range(m.sinks), *range(m.lower(n), n)],
    "lte": lambda m, prompt, n: [*range(m.sinks), *range(n - m.window, n)],
    "luka": lambda m, prompt, n: [*range(m.sinks), *range(n - m.tail, n)],
    "h2o_as_published": lambda m, prompt, n: range(n + 1 - m.window, n),
}
"""By method, without its base: positions that the token at position ``n`` reads."""

DENSE = {
    "luka": lambda m, n: n <= m.tail,
    "rocketkv": lambda m, n: n <= max(budget(m.keep, n), m.window),
    "streaming": lambda m, n: m.lower(n - 1) <= m.sinks,
}
"""By method that may read less of a few tokens: whether ``n`` are read whole."""


def of(table: dict, method: Method):
    """The entry of a method, or of one that it derives from; None without one."""
    return next((table[name] for name in table if isinstance(method, get(name))), None)


def always_read(method: Method, prompt: int, length: int) -> Iterable[int]:
    """Positions that the token at position ``length`` reads. Negative ones, and later ones, do not count."""
    if own := of(BASES, method):
        return own(method, prompt, length)
    if isinstance(method, KeepsByScore):
        newest = prompt if method.evicts and not method.evicts.in_decode else length
        return [*range(method.sinks), *range(newest - method.window, length)]
    if isinstance(method, PageMethod) and method.tail:
        return [*range(method.sinks), *range(length + 1 - method.tail, length)]
    return []


def short_is_dense(method: Method, length: int) -> bool:
    """Whether a context of a few tokens is dense."""
    own = of(DENSE, method)
    return own is None or own(method, length)
