"""Perplexity over that of dense attention, paired on the same texts: far sharper than two perplexities side by side."""

from __future__ import annotations

import math

import numpy as np

from foveate.lab.evaluation.metrics import Interval, Values, paired_bootstrap
from foveate.lab.report.rows import Row


def perplexity_ratio(row: Row, dense: Row) -> Interval:
    """Perplexity of a row over that of the dense row of the same run, with its 95 % paired-bootstrap interval."""
    ours, theirs = ({key: np.array(column) for key, column in one["item_values"].items()} for one in (row, dense))
    log = paired_bootstrap(_nats_a_token, ours, theirs, row["seed"])
    return Interval(*(math.exp(value) for value in (log.value, log.low, log.high)))


def _nats_a_token(values: Values) -> np.ndarray:
    return values["nll"].sum(axis=-1) / values["tokens"].sum(axis=-1)
