"""recur: the gated delta rule, a state of fixed size that reads a sequence of any length."""

from foveate.hybrids.ops.recur.delta_rule import Recurred, gated_delta_rule, rule_in_use

__all__ = ["Recurred", "gated_delta_rule", "rule_in_use"]
