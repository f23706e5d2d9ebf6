"""The sparsity feedback of learned eviction (laLTE, section 3.1.2, equation 7 and Algorithm 1).

Each head of each LTE layer has a weight λ. The penalty λ·ReLU(r − 0.5) pulls its retention scores r below the
layers' threshold. Every `interval` steps, λ rises where the head retains more than `budget` tokens and falls where it
retains fewer than 95 % of it. Paper and published code differ; `variant` names whose rules are followed:

| | `code` (default) | `paper` |
|---|---|---|
| penalty, mean over the batch | mean over tokens, layers and heads | sum over tokens, layers and heads (equation 7) |
| moving average | (1 − a)·old + a·new | a·old + (1 − a)·new (Algorithm 1, line 6) |
| λ becomes 0 | where λ < 1e-9 | where the average count is < 1e-9 (line 12) |
| λ = 0 becomes 1e-9 | where the count is at least 95 % of `budget` | where the count is above `budget` (line 13) |

The weight a is 2 / (1 + interval / 2), which is 2/17 at 32. With it the paper's line 6 hardly averages, while the
paper's text asks for an average over the cycle, as the code computes. Algorithm 1 writes the penalty ReLU(r); both
variants follow equation 7. The paper names no factor of λ; the code multiplies by 1.5 and halves. Neither names the
first value of the average: here it is the first count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.errors import UserError, require, unknown
from foveate.hybrids.training.settings import setting

VARIANTS = ("code", "paper")
_FLOOR, _LEAST, _MOST = 0.95, 1e-9, 1.0
"""Share of the budget below which λ falls; the least λ above 0, with which a re-enabled one begins; the largest."""
MUTE = 100
"""Steps without a retained token after which a run warns of a head."""
SPARED = 6
"""Last tokens of a sequence that are not counted: LTE's scores read six tokens ahead, which these tokens lack."""


@dataclass(frozen=True)
class SparsitySettings:
    """Constants of the feedback. The defaults are the constants of the paper's runs of 20,480 steps.

    λ needs about 40 updates from 1e-9 to 1e-2. Short runs want a shorter interval and larger factors: `interval` 8,
    `up` 2. `hold` is the published code's warm-up: attention first learns to find what is far away, and the scores
    learn from it what deserves to stay. `release` and `recall` are ours: see `foveate.hybrids.training.opening`.
    """

    budget: int | None = setting(None, "retained tokens a head may have, of a training sequence; none: no feedback")
    interval: int = setting(32, "steps between two updates of λ (u)")
    start: float = setting(1e-9, "λ of every head at first")
    up: float = setting(1.5, "factor of λ above the budget")
    down: float = setting(0.5, "factor of λ where a head retains less than 95 % of the budget")
    hold: float = setting(
        0.0,
        "share of the run at first in which every token is retained and λ rests; scores learn without moving the "
        "model. With a bound on recall: the longest that this may take",
    )
    release: float = setting(
        0.0,
        "share of the run after the hold in which ever fewer rows are open; one of eight stays so. Where there is "
        "one, a bias of the scores keeps the budget from the hold on, and λ is not used",
    )
    recall: float | None = setting(
        None,
        "percentage of far needles and pairs (log.answers) that must be right before the hold ends and while the "
        "release goes on; a run that never gets there ends with the hold. None: hold and release end by the clock",
    )
    variant: str = setting("code", "code or paper: whose rules where they differ")

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise unknown("variant", str(self.variant), VARIANTS, "sparsity")
        budget, recall, left = self.budget, self.recall, 1 - self.hold
        of_run = f"at least 0 and below {left:g}, what sparsity.hold leaves of the run"
        of_far = "in (0, 100], with a sparsity.hold above 0"
        require(self.interval >= 1, "sparsity.interval", "at least 1", self.interval)
        require(budget is None or budget >= 1, "sparsity.budget", "at least 1", budget)
        require(self.up > 1, "sparsity.up", "above 1", self.up)
        require(0 < self.down < 1, "sparsity.down", "between 0 and 1", self.down)
        require(0 <= self.start <= _MOST, "sparsity.start", f"from 0 to {_MOST:g}", self.start)
        require(0 <= self.hold < 1, "sparsity.hold", "in [0, 1)", self.hold)
        require(0 <= self.release < left, "sparsity.release", of_run, self.release)
        require(recall is None or (0 < recall <= 100 and self.hold > 0), "sparsity.recall", of_far, recall)
        for name in ("hold", "release"):
            if (share := getattr(self, name)) and self.budget is None:
                raise UserError(f"sparsity.{name} is {share:g}, and sparsity.budget is none; set one, or no {name}")

    def held(self, steps: int) -> int:
        """The number of steps of the hold, in a run of ``steps`` steps."""
        return round(self.hold * steps)


class SparsityFeedback:
    """λ `[layers, heads]`, its penalty and its updates. Nothing is read back to the host.

    A step of training calls `penalty` and `observe` once for each micro-batch, then `step` once. Every rank calls
    `step`, which averages the counts over the ranks with one small all-reduce. λ and the moving average are therefore
    the same on every rank after each step, so one rank's state is every rank's.
    """

    def __init__(self, settings: SparsitySettings):
        if settings.budget is None:
            raise UserError("sparsity.budget is none; a feedback needs a number of tokens")
        from foveate.hybrids.layers.lte import THRESHOLD  # here, as reading a configuration need not load the layers

        self._threshold = THRESHOLD
        self.settings = settings
        self.steps = 0
        self.retained: Tensor | None = None
        """What heads retain, to report: `average`, or a held step's counts."""
        self.weights: Tensor | None = None
        """λ, fp32 `[layers, heads]`; None before the first scores."""
        self.average: Tensor | None = None
        """Moving average of the counts, fp32 `[layers, heads]`; None before the first step."""
        self.silent: Tensor | None = None
        """Steps since each head last retained a token, int32 `[layers, heads]`; None before the first step."""
        self.slope: Tensor | None = None
        """The sigmoid's mean slope at the scores of the last step, at most 1/4, fp32 `[layers, heads]`."""
        self._counts: Tensor | None = None
        self.excess: Tensor | None = None
        """By how much the scores of each head are too high for the budget, before the sigmoid, mean over the sequences;
        fp32 `[layers, heads]` after a step that observed it, else None."""
        self._slopes: Tensor | float = 0.0
        self._excess: Tensor | float = 0.0
        self._observed = 0
        self._warned: set[tuple[int, ...]] = set()

    def penalty(self, retention: Sequence[Tensor]) -> Tensor:
        """The term to add to a micro-batch's loss, a scalar; of scores in (0, 1), fp32 `[B, Hkv, L]` a layer."""
        scores = _stacked(retention)
        excess = (scores - self._threshold).relu()
        weights = self._weights_for(scores)[:, None, :, None]
        if self.settings.variant == "paper":
            return (weights * excess).sum() / scores.shape[1]
        return (weights * excess).mean()

    @torch.no_grad()
    def observe(self, retention: Sequence[Tensor], biased: bool = False) -> None:
        """Counts the retained tokens of a micro-batch, mean over its sequences. Where a bias keeps the budget, also
        takes the highest score of each sequence for which the budget has no room."""
        scores = _stacked(retention)
        self._weights_for(scores)
        if scores.shape[-1] <= SPARED:
            raise ValueError(f"sequences of {scores.shape[-1]} tokens, of which the last {SPARED} are not counted")
        counted = scores[..., : scores.shape[-1] - SPARED]
        counts = (counted > self._threshold).sum(-1, dtype=torch.float32).mean(1)
        self._counts = counts if self._counts is None else self._counts + counts
        if biased:
            first_left = max(1, counted.shape[-1] - self.settings.budget)
            self._excess = self._excess + counted.logit(eps=1e-6).kthvalue(first_left).values.mean(1)
        self._slopes = self._slopes + (scores * (1 - scores)).mean((1, 3))
        self._observed += 1

    @torch.no_grad()
    def step(self, held: bool = False) -> None:
        """Ends a step of training: folds its counts into the average, and updates λ if it is the interval's last.

        A `held` step changes neither λ nor the average; what it counted is only reported.
        """
        if self._counts is None:
            raise RuntimeError("step() without observe(): no scores were counted in this step")
        counts, self._counts = _over_ranks(self._counts / self._observed), None
        self.slope, self._slopes = self._slopes / self._observed, 0.0
        self.excess = _over_ranks(self._excess / self._observed) if isinstance(self._excess, Tensor) else None
        self._excess, self._observed = 0.0, 0
        silent = 1 if self.silent is None else self.silent + 1
        self.silent = torch.where(counts > 0, 0, silent)
        if held:
            self.retained = counts
            return
        a = 2 / (1 + self.settings.interval / 2)
        kept = a if self.settings.variant == "paper" else 1 - a
        self.average = counts if self.average is None else kept * self.average + (1 - kept) * counts
        self.retained = self.average
        self.steps += 1
        if self.steps % self.settings.interval == 0:
            self._update()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors from which `load_state_dict` goes on; between two steps only."""
        state = {"steps": torch.tensor(self.steps)}
        if self.weights is not None:
            state["weights"] = self.weights
        if self.average is not None:
            state["average"] = self.average
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        self.weights, self.average = state.get("weights"), state.get("average")
        self.retained = self.average
        self._counts, self._slopes, self._excess, self._observed = None, 0.0, 0.0, 0

    def summary(self) -> dict[str, float | list[list[float]]]:
        """What to log; waits for the device.

        λ's mean and largest and the share of heads without; what each head retains (`retained`, `[layers][heads]`), its
        mean and largest; and the numbers of heads that are silent (they retained nothing in the last step) and that are
        saturated (at their scores the sigmoid is flatter than a twelfth of its steepest slope: they hardly learn).
        """
        if self.weights is None or self.retained is None or self.slope is None:
            return {}
        return {
            "lambda_mean": self.weights.mean().item(),
            "lambda_max": self.weights.amax().item(),
            "lambda_zero": (self.weights == 0).float().mean().item(),
            "retained_mean": self.retained.mean().item(),
            "retained_max": self.retained.amax().item(),
            "heads_silent": (self.silent > 0).sum().item(),
            "heads_saturated": (self.slope < 0.25 / 12).sum().item(),
            "retained": [[round(count, 1) for count in layer] for layer in self.retained.tolist()],
        }

    def warning(self) -> str | None:
        """Names heads that have retained nothing for `MUTE` steps, each once; waits for the device."""
        mute = [] if self.silent is None else [(*at,) for at in (self.silent >= MUTE).nonzero().tolist()]
        fallen = [at for at in mute if at not in self._warned]
        self._warned.update(fallen)
        if not fallen:
            return None
        heads = ", ".join(f"{layer}.{head}" for layer, head in fallen)
        return (
            f"of the LTE heads (layer.head, from 0), {heads} retained nothing for {MUTE} steps and see their window "
            "alone; try a lower optim.scores, or sparsity.hold"
        )

    def _update(self) -> None:
        s, average = self.settings, self.average
        above, below = average > s.budget, average < _FLOOR * s.budget
        weights = torch.where(above, self.weights * s.up, torch.where(below, self.weights * s.down, self.weights))
        weights = weights.clamp(max=_MOST)
        vanished, wanted = (average < 1e-9, above) if s.variant == "paper" else (weights < _LEAST, ~below)
        weights = weights.masked_fill(vanished, 0)
        self.weights = weights.masked_fill((weights == 0) & wanted, _LEAST)

    def _weights_for(self, scores: Tensor) -> Tensor:
        shape = (scores.shape[0], scores.shape[2])
        if self.weights is None:
            self.weights = torch.full(shape, self.settings.start, dtype=torch.float32, device=scores.device)
        if self.weights.shape != shape:
            raise ValueError(f"retention of {shape} (layers, heads), λ is of {tuple(self.weights.shape)}")
        if self.weights.device != scores.device:  # read from a checkpoint
            self.weights = self.weights.to(scores.device)
            self.average = None if self.average is None else self.average.to(scores.device)
        return self.weights


def _over_ranks(counts: Tensor) -> Tensor:
    """The mean over the ranks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts)
        counts /= dist.get_world_size()
    return counts


def _stacked(retention: Sequence[Tensor]) -> Tensor:
    """Scores as one tensor `[layers, B, Hkv, L]`."""
    if not retention:
        raise ValueError("retention is empty: the model has no layer that evicts by learned scores")
    if len({scores.shape for scores in retention}) > 1:
        shapes = ", ".join(str(tuple(scores.shape)) for scores in retention)
        raise ValueError(f"all layers' retention must have one shape [B, Hkv, L], got {shapes}")
    return torch.stack(tuple(retention)).float()
