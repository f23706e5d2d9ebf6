"""Tables of methods beside dense attention."""

from benchmarks.table_kinds import differences
from tests.lab.report.plots.test_plots import FRONTIER, row
from tests.lab.report.tables.test_general import MORE

ROWS = [one | MORE | {"ceiling": 100.0} for one in FRONTIER]


def body(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_a_line_a_method_and_a_column_a_comparison():
    table = differences(ROWS)
    assert table.startswith("tiny, float32; score / difference to dense, points [95 %, paired] / keys read (cpu;")
    head, _, dense, *others = body(table)
    assert head == ["method", "niah single 4K, n = 50", "niah single 8K, n = 50"]
    assert dense == ["`dense`", "80.0", "80.0"]
    assert others[0] == [
        *("`h2o:top_k=0.05`", "30.0 / -50.0 [-52.0, -48.0] / 6.0 %", "20.0 / -60.0 [-62.0, -58.0] / 6.0 %")
    ]
    assert others[1][2] == "–"  # which the second comparison lacks


def test_the_evidence_ceiling_is_told_where_it_is_below_all():
    assert "ceiling" not in differences(ROWS)
    *_, last = body(differences([one | {"ceiling": 60.0 if one["length"] == 8192 else 100.0} for one in ROWS]))
    assert last == ["evidence ceiling", "100.0", "60.0"]


def test_a_table_for_each_model_with_its_own_circumstances():
    other = [one | {"model": "other", "commit": "def"} for one in ROWS]
    first, second = differences(ROWS + other).split("\n\nother, ")
    assert "commit abc" in first
    assert "def" not in first
    assert "commit def" in second


def test_rows_that_read_nothing():
    silent = row("tova", None) | MORE
    assert body(differences([*ROWS, silent | {"ceiling": 100.0}]))[-1][1].endswith("/ –")
