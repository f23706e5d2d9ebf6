"""Choosing the anchor layers of Kascade for a model: the plan, its resumable run, and what anchors lose and cost."""
