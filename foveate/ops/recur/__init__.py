"""recur: the gated delta rule, a state of fixed size that reads a sequence of any length."""

from foveate.ops.recur.delta_rule import Recurred, gated_delta_rule, rule_in_use
from foveate.ops.recur.reference import gated_delta_rule as gated_delta_rule_reference

__all__ = ["Recurred", "gated_delta_rule", "gated_delta_rule_reference", "rule_in_use"]
