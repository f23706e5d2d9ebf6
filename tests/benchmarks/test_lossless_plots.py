"""The plot of accepted drafts is drawn from the rows that are committed."""

from benchmarks import lossless_plots
from tests.benchmarks.test_csa_report import RESULTS


def test_accepted_drafts_are_drawn(tmp_path):
    out = tmp_path / "accepted.png"
    lossless_plots.accepted(RESULTS / "lossless.jsonl", out)
    assert out.read_bytes().startswith(b"\x89PNG")
