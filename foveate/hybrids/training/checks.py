"""What a configuration is checked for before a run begins."""

from __future__ import annotations

from foveate.errors import UserError
from foveate.hybrids.training import network
from foveate.hybrids.training.configuration import TrainingConfig
from foveate.hybrids.training.opening import MEASURED


def check_sparsity(config: TrainingConfig) -> str | None:
    """A note if layers that evict have no budget. Raises `UserError` for a budget that no layer of a hybrid heeds."""
    mixers = getattr(network.configuration(config.model), "mixers", None)
    if mixers is None:  # not a hybrid
        return None
    budget, bound = config.sparsity.budget, config.sparsity.recall
    if round((config.sparsity.hold + config.sparsity.release) * config.steps) >= config.steps:
        raise UserError(
            f"sparsity.hold is {config.sparsity.hold:g} and sparsity.release {config.sparsity.release:g}: of "
            f"{config.steps:,} steps none is left after them"
        )
    if bound is not None and not (config.log.answers and any(kind in config.mixture for kind in MEASURED)):
        raise UserError(
            f"sparsity.recall is {bound:g}, and nothing measures recall: set log.answers, and give the mixture "
            f"{' or '.join(MEASURED)}"
        )
    if bound is not None and not config.sparsity.held(config.steps):
        raise UserError(
            f"sparsity.hold is {config.sparsity.hold:g}: of {config.steps:,} steps none is left in which the model "
            "could reach sparsity.recall"
        )
    if budget is not None and "lte" not in mixers:
        raise UserError(
            f"sparsity.budget is {budget:,}, and no layer of the model evicts by learned scores: its mixers are "
            f"{', '.join(dict.fromkeys(mixers))}; set sparsity.budget to none, or train a model with lte layers"
        )
    if budget is None and "lte" in mixers:
        return "sparsity.budget is none: nothing keeps the tokens few that the lte layers retain"
    return None
