"""LuKA for one sequence, in fp64 and without any of foveate's operations: slow, and written to be read.

But for the bytes of low-rank summaries, which tests/ops/test_low_rank.py tests.

At every decoded token the tree is grown anew from the raw tokens and the cover is taken from its roots down. All that
is carried from step to step is what the attention has done: the mass that tokens have received, in all and lately, and
what pages have received lately.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import torch

from foveate import ops
from foveate.ops.compress.low_rank import factors


@dataclasses.dataclass(eq=False)
class Node:
    """A raw token (level -1), or a summary of the tokens beneath."""

    level: int
    number: int
    tokens: list[int]
    weights: np.ndarray
    """With which each of the tokens enters the summary."""
    key: np.ndarray
    value: np.ndarray
    children: list[Node] = dataclasses.field(default_factory=list)
    parent: Node | None = None
    spread: np.ndarray | None = None

    @property
    def log_size(self) -> float:
        return math.log(len(self.tokens))

    @property
    def entropy(self) -> float:
        some = self.weights[self.weights > 0]
        return float(-(some * np.log(some)).sum())


class Sequence:
    """What the method makes of queries ``q [Hq, T, D]``, keys and values ``[Hkv, T, D(v)]``."""

    def __init__(self, method, q, k, v, prompt: int, scaling: float, softcap: float = math.inf):
        self.method, self.q, self.k, self.v, self.prompt, self.scaling = method, q, k, v, prompt, scaling
        self.softcap = softcap
        self.heads, self.group = len(k), len(q) // len(k)
        self.mass = np.zeros(k.shape[:2])  # summed over the heads of the group
        self.keys_read = self.pages_refined = 0.0
        self.held: dict[tuple[int, int, int], np.ndarray] = {}  # keys by low-rank summaries, as of shares_made
        for h, query in itertools.product(range(len(q)), range(prompt)):
            logits = self.cap(self.k[h // self.group, : query + 1] @ q[h, query] * scaling)
            self.mass[h // self.group, : query + 1] += softmax(logits)
        self.recent = np.zeros(k.shape[:2])  # mean over the heads of the group
        for h, query in itertools.product(range(len(q)), range(max(0, prompt - method.window), prompt)):
            logits = self.cap(self.k[h // self.group, : query + 1] @ q[h, query] * scaling)
            self.recent[h // self.group, : query + 1] += softmax(logits) / self.group / method.window
        self.recent_of_nodes: dict[tuple[int, int, int], float] = {}  # by head, level and number
        self.shares_made: dict[tuple[int, int, int], np.ndarray] = {}

    def cap(self, logits: np.ndarray) -> np.ndarray:
        return logits if math.isinf(self.softcap) else self.softcap * np.tanh(logits / self.softcap)

    def decode(self, token: int) -> np.ndarray:
        """Output ``[Hq, Dv]`` of a token; to be called for one token after the other."""
        trees = [self.grow(head, token) for head in range(self.heads)]
        logits = [self.log_weights(head, token, tree.roots) for head, tree in enumerate(trees)]
        covers = [dict(zip(tree.roots, weights)) for tree, weights in zip(trees, logits)]  # logits [G] of each node
        ranks = [dict(zip(tree.roots, self.ranks(h, token, tree.roots, covers[h]))) for h, tree in enumerate(trees)]
        seen = [sum(self.reads_of(node) for node in cover if node.level >= 0) for cover in covers]
        looked_at = [[node for node in cover if node.level >= 0] for cover in covers]
        refined = [[] for _ in covers]
        for level in reversed(range(len(trees[0].levels))):
            refined = self.choose(level, token, trees, covers, ranks)
            for head, nodes in enumerate(refined):
                for node in nodes:
                    self.replace(head, token, node, covers[head], ranks[head])
                    seen[head] += sum(map(self.reads_of, node.children)) if level else 0
                    looked_at[head] += node.children if level else []
        outs = np.zeros((len(self.q), self.v.shape[2]))
        for head, cover in enumerate(covers):
            assert_is_cover(cover, token + 1)
            masses = softmax(np.stack(list(cover.values()), 1))  # [G, N]
            outs[head * self.group : (head + 1) * self.group] = masses @ np.stack([node.value for node in cover])
            for node, mass in zip(cover, masses.sum(0)):
                if node.level < 0 and node.tokens[0] >= trees[head].paged:
                    self.mass[head, node.tokens[0]] += mass
                    recent = self.recent[head, node.tokens[0]]
                    self.recent[head, node.tokens[0]] += (mass / self.group - recent) / self.method.window
            for node in looked_at[head]:
                got = sum(m for n, m in zip(cover, masses.mean(0)) if set(n.tokens) <= set(node.tokens))
                name = head, node.level, node.number
                self.recent_of_nodes[name] += (got - self.recent_of_nodes[name]) / self.method.window
            raw = sum(node.level < 0 for node in cover)
            self.keys_read += (raw + seen[head]) / self.heads
            self.pages_refined += len(refined[head]) / self.heads if trees[head].levels else 0
        return outs

    # The tree

    def ends(self, token: int) -> list[int]:
        """Where the pages end that are there when a token is decoded."""
        every = min(16, self.method.sizes[-1])
        stop = self.prompt + (token - self.prompt) // every * every - self.method.tail
        size, ends = self.method.sizes[0], []
        while True:
            end = (ends[-1] if ends else self.method.sinks) + size
            if end > stop:  # pages are made when the node over them is complete
                return ends[: len(ends) // self.method.pages.group * self.method.pages.group]
            ends.append(end)

    def grow(self, head: int, token: int) -> Tree:
        """The tokens and all that stands above them."""
        keys, values = self.k[head], self.v[head]
        tokens = [Node(-1, at, [at], np.ones(1), keys[at], values[at]) for at in range(token + 1)]
        ends = self.ends(token)
        bounds = [self.method.sinks, *ends]
        levels = []
        if ends:
            levels.append([self.join(head, n, tokens[a:b]) for n, (a, b) in enumerate(itertools.pairwise(bounds))])
        for size, larger in itertools.pairwise(self.method.sizes if ends else ()):
            below, branch = levels[-1], larger // size
            complete = range(len(below) // branch)
            if complete:
                levels.append([self.join(head, n, below[n * branch : (n + 1) * branch]) for n in complete])
            else:
                break
        roots = [node for nodes in (tokens, *levels) for node in nodes if node.parent is None]
        roots.sort(key=lambda node: node.tokens[0])
        return Tree(levels, roots, ends[-1] if ends else 0)

    def join(self, head: int, number: int, children: list[Node]) -> Node:
        """A summary of some nodes."""
        tokens = [at for child in children for at in child.tokens]
        name = head, children[0].level + 1, number
        if name not in self.shares_made:  # once: what made it may get more attention later
            self.shares_made[name] = self.shares(head, children)
            self.recent_of_nodes[name] = sum(self.recently(head, child) for child in children)
        shares = self.shares_made[name]
        weights = np.concatenate([share * child.weights for share, child in zip(shares, children)])
        keys, values = self.k[head, tokens], self.v[head, tokens]
        key, value = weights @ keys, weights @ values
        node = Node(
            children[0].level + 1,
            number,
            tokens,
            weights,
            key,
            value,
            children,
            spread=weights @ (keys - key) ** 2,
        )
        for child in children:
            child.parent = node
        return node

    def recently(self, head: int, node: Node) -> float:
        """Attention that a node got lately."""
        if node.level < 0:
            return self.recent[head, node.tokens[0]]
        return self.recent_of_nodes[head, node.level, node.number]

    def shares(self, head: int, children: list[Node]) -> np.ndarray:
        """Weights of the children in their parent."""
        if self.method.compressor == "mean":
            return np.full(len(children), 1 / len(children))
        received = np.array([self.mass[head, child.tokens].sum() for child in children]) / self.group
        return softmax(received / 7.0)

    # What nodes weigh

    def dots(self, head: int, token: int, vectors: np.ndarray) -> np.ndarray:
        """``[N, D] -> [N, G]``, not capped."""
        return vectors @ self.q[head * self.group : (head + 1) * self.group, token].T * self.scaling

    def capped_dot(self, head: int, token: int, node: Node) -> np.ndarray:
        return self.cap(self.dots(head, token, node.key[None])[0])

    def deviation(self, head: int, token: int, node: Node) -> np.ndarray:
        """Under a cap: how far above the summary's logit is that of a key a deviation away."""
        rows = self.q[head * self.group : (head + 1) * self.group, token] * self.scaling
        dot = self.dots(head, token, node.key[None])[0]
        return self.cap(dot + np.sqrt(rows**2 @ node.spread)) - self.cap(dot)

    def log_weights(self, head: int, token: int, nodes: list[Node]) -> np.ndarray:
        """Logits ``[N, G]`` with which nodes enter the softmax."""
        logits = self.cap(self.dots(head, token, np.stack([node.key for node in nodes])))
        for node, row in zip(nodes, logits):
            if node.level < 0 or self.method.bias == "none":
                continue
            row += node.entropy if self.method.bias == "entropy" else node.log_size
        return logits

    def ranks(self, head: int, token: int, nodes: list[Node], weights: dict[Node, np.ndarray]) -> list[np.ndarray]:
        """Logarithms ``[G]`` of the masses by which nodes are chosen."""
        found = []
        for node in nodes:
            if node.level < 0 or self.method.score == "summary":
                found.append(weights[node])
            elif self.method.score == "lowrank":
                found.append(np.logaddexp.reduce(self.cap(self.dots(head, token, self.as_held(head, node))), 0))
            else:
                plain = self.capped_dot(head, token, node) + node.log_size
                found.append(plain + free_energy(self.deviation(head, token, node), node.log_size))
        return found

    def as_held(self, head: int, node: Node) -> np.ndarray:
        """The keys beneath a node as its low-rank summary has them."""
        name = head, node.level, node.number
        if name not in self.held:
            keys = torch.from_numpy(self.k[head, node.tokens]).float()[None, None]
            form = ops.PageRecord(keys.shape[3], keys.shape[2])
            self.held[name] = factors(ops.compress_pages(keys, form), form).keys()[0, 0, 0].double().numpy()
        return self.held[name]

    def reads_of(self, node: Node) -> float:
        """Of a key and its value in fp32: the summary's own, half for the spread, the bytes of a low-rank summary; only
        what is looked at."""
        record = 0.0
        if self.method.score == "lowrank":
            dim, value_dim = self.k.shape[2], self.v.shape[2]
            record = ops.PageRecord(dim, len(node.tokens)).bytes / (4 * (dim + value_dim))
        return 1 + (self.method.score == "spread") / 2 + record

    # Refinement

    def replace(self, head: int, token: int, node: Node, cover: dict, ranks: dict) -> None:
        """Refine a node of a cover."""
        weights = self.log_weights(head, token, node.children)
        own = dict(zip(node.children, weights))
        chosen_by = dict(zip(node.children, self.ranks(head, token, node.children, own)))
        mass, _ = cover.pop(node), ranks.pop(node)
        if self.method.mass == "preserve":
            shift = mass - np.logaddexp.reduce(weights, 0)
            own = {child: weight + shift for child, weight in own.items()}
            chosen_by = {child: rank + shift for child, rank in chosen_by.items()}
        cover |= own
        ranks |= chosen_by

    def choose(self, level: int, token: int, trees: list[Tree], covers: list, ranks: list) -> list[list[Node]]:
        """The nodes of a level that are refined, for each KV head."""
        candidates = [sorted((n for n in cover if n.level == level), key=lambda n: n.number) for cover in covers]
        if not any(candidates):
            return candidates
        masses = []  # [N, G] of each KV head
        for nodes, cover, rank in zip(candidates, covers, ranks):
            others = [weight for node, weight in cover.items() if node.level != level]
            estimates = np.array([rank[node] for node in nodes]).reshape(-1, self.group)
            masses.append(np.exp(estimates - np.logaddexp.reduce([*estimates, *others], 0)))
        if self.method.pool == "layer":
            masses = [np.concatenate(masses, 1).max(1)] * self.heads
        else:
            masses = [mass.mean(1) for mass in masses]
        if self.method.prior:
            masses = self.with_prior(candidates, masses)
        found = []
        for tree, nodes, mass in zip(trees, candidates, masses):
            size = dict(zip(nodes, mass))
            order = sorted(nodes, key=lambda node: (-size[node], node.number))
            found.append(order[: amount(self.method.expand if level else self.method.top_k, len(tree.levels[level]))])
        return found

    def with_prior(self, candidates: list[list[Node]], masses: list[np.ndarray]) -> list[np.ndarray]:
        """Masses ``[N]`` of each KV head, mixed with what the nodes got lately."""
        prior = self.method.prior
        recent = [np.array([self.recently(h, node) for node in nodes]) for h, nodes in enumerate(candidates)]
        if self.method.pool == "layer":
            recent = [np.max(recent, 0)] * self.heads
        return [mass * (1 - prior) + own * prior for mass, own in zip(masses, recent)]


@dataclasses.dataclass
class Tree:
    levels: list[list[Node]]
    roots: list[Node]
    paged: int
    """First token of the tail; 0 while there is no page."""


def assert_is_cover(cover, tokens: int) -> None:
    """Each token is represented once: by itself, or by one ancestor."""
    assert sorted(at for node in cover for at in node.tokens) == list(range(tokens))


def amount(budget: int | float, total: int) -> int:
    return max(math.floor(budget * total + 1e-9), 1) if isinstance(budget, float) else budget


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def free_energy(deviation: np.ndarray, log_size: float) -> np.ndarray:
    edge = math.sqrt(2 * log_size)
    return np.where(deviation < edge, deviation**2 / 2, edge * deviation - log_size)
