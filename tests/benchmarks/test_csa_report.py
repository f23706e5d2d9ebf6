"""The indexer's rows beside the paper's: tables and pictures."""

import json
from pathlib import Path

import pytest

from benchmarks import csa_plots, csa_tables
from foveate.errors import DataError
from foveate.lab.report.plots import figure
from foveate.lab.report.rows import read_bench
from tests.lab.report.plots.test_plots import drawn, entries
from tests.lab.report.test_decode_report import ELSEWHERE as MADE
from tests.lab.report.test_decode_report import cells

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def of_indexer(impl="foveate", tokens=32768, ms=4.0, gb=0.5, top_k=512, dtype="bfloat16", gpus=1, recall=1.0):
    case = {"impl": impl, "tokens": tokens, "heads": 64, "dim": 128, "top_k": top_k, "ratio": 4, "dtype": dtype}
    rates = {"tflop_per_s": 400.0, "of_matmul": 0.5, "gb_per_s": None}
    measured = {"ms": ms, "peak_bytes": gb * 1e9, "recall_min": recall, **rates}
    return {"bench": "indexer", "impl": impl, "case": {**case, "gpus": gpus}, **measured, **MADE}


def of_study(study, value, tokens=262144, ms=250.0, recall=(1.0, 1.0, 1.0)):
    names = ("recall_mean", "recall_min", "recall_whole")
    case = {"study": study, "value": value, "tokens": tokens, "heads": 64, "dim": 128, "ratio": 4, "dtype": "bfloat16"}
    return {
        "bench": "indexer-study",
        "case": case,
        "ms": ms,
        "peak_bytes": 1.5e9,
        **dict(zip(names, recall)),
        "recall_n": 100,
        **MADE,
    }


def of_layer(tokens=262144, ms=300.0, share=0.5):
    dims = {"heads": 64, "dim": 512, "index_heads": 64, "window": 128, "top_k": 512, "dtype": "bfloat16"}
    times = {"ms": ms, "indexer_ms": 200.0, "attention_ms": 100.0, "attention_tflop_per_s": 200.0}
    case = {"impl": "foveate", "tokens": tokens, **dims}
    found = {"peak_bytes": 2e9, "attention_of_matmul": share, "error": 0.002, **times}
    return {"bench": "csa", "impl": "foveate", "case": case, **found, **MADE}


class TestTables:
    def test_lengths_beside_the_paper(self):
        rows = [of_indexer(tokens=65536, ms=61.0), of_indexer(), of_indexer("materialised", ms=40.0, gb=70, recall=0.9)]
        text = csa_tables.indexer_lengths(rows)
        assert text.startswith("64 heads of 128, k = 512, 4 tokens a key, bfloat16 (a device; torch 2, transformers 5;")
        short, long = cells(text)
        assert short["foveate"] == "4.00 ms, 0.50 GB"
        assert short["materialised"] == "40.00 ms, 70.00 GB"
        assert short["paper, materialised"] == "317 ms, 129.00 GB"
        assert short["recall, least"] == "0.9000"
        assert long["tokens"] == "64K"
        assert long["materialised"] == "–"
        assert long["paper, materialised"] == "out of memory"
        assert long["paper's chunked / ours"] == "2.0×"

    def test_what_the_paper_does_not_have_takes_no_column(self):
        peer = of_indexer("deepgemm+flashinfer", dtype="float8_e4m3fn", ms=1200.0)
        (line,) = cells(csa_tables.indexer_lengths([peer, of_indexer(dtype="float8_e4m3fn")]))
        rates = ["TFLOP/s (of matmul)", "GB/s", "selection, of scoring"]
        assert list(line) == ["tokens", "foveate", "deepgemm+flashinfer", *rates, "recall, least"]
        assert line["deepgemm+flashinfer"] == "1.20 s, 0.50 GB"

    def test_what_rows_do_not_have_yet_is_a_dash(self):
        new = of_indexer(tokens=65536) | {"gb_per_s": 1234.4, "score_ms": 50.0, "select_ms": 6.0}
        old, line = cells(csa_tables.indexer_lengths([of_indexer(), new]))
        assert (old["GB/s"], old["selection, of scoring"]) == ("–", "–")
        assert (line["GB/s"], line["selection, of scoring"]) == ("1,234", "12 %")

    def test_parity(self):
        rows = [of_indexer(tokens=tokens) for tokens in (2048, 32768)]
        (line,) = cells(csa_tables.indexer_parity([*rows, of_indexer("materialised", tokens=2048, ms=12.0)]))
        assert (line["keys"], line["materialised / ours"]) == ("512", "3.0×")

    def test_gpus(self):
        rows = [of_indexer(tokens=1048576, ms=4000.0), of_indexer(tokens=1048576, ms=2000.0, gpus=2)]
        assert [line["over one"] for line in cells(csa_tables.indexer_gpus(rows))] == ["1.00×", "2.00×"]

    def test_settings_and_ablations(self):
        rows = [
            of_study("top_k", 64),
            of_study("key_chunk", 1024, 16384),
            of_study("key_chunk", 1024),
            of_study("ablation", "none", 16384),
            of_study("ablation", "A3: scores in fp16", 16384, recall=(0.99981, 0.99, 0.9)),
        ]
        settings = cells(csa_tables.indexer_settings(rows))
        assert [line["paper (chunked)"] for line in settings] == ["1.75 s, 0.35 GB", "–", "9.48 s, 1.58 GB"]
        _, half = (line.split("|")[1:-1] for line in csa_tables.indexer_ablations(rows).splitlines()[-2:])
        assert [cell.strip() for cell in half[:5]] == ["A3: scores in fp16", "0.9998", "0.9900", "90.00 %", "0.9998"]

    def test_layer_and_model(self):
        first, second = cells(csa_tables.csa_layer([of_layer(), of_layer(tokens=1000)]))
        assert (first["paper, materialised indexer"], first["paper, chunked indexer"]) == (
            "out of memory",
            "1.97 s, 18.56 GB",
        )
        assert first["its TFLOP/s (of matmul)"] == "200 (50 %)"
        assert second["paper, materialised indexer"] == second["paper, chunked indexer"] == "–"
        (line, *_) = cells(csa_tables.csa_model(read_bench([RESULTS / "csa-model.jsonl"], "csa-model")))
        assert line["by"] == "transformers"


@pytest.mark.usefixtures("coarse")
class TestPlots:
    def test_lengths_with_the_papers_marks(self, pages_of, tmp_path):
        pages = pages_of(figure)
        rows = [of_indexer(), of_indexer(tokens=65536, ms=16.0), of_indexer(dtype="float8_e4m3fn"), of_indexer(gpus=2)]
        csa_plots.lengths(rows, tmp_path / "a.png")
        time, memory, others_time, others_memory = pages[0].axes
        assert drawn(time)["foveate, k = 512, bf16"] == [[32768, 4], [65536, 16]]
        assert drawn(others_memory)["foveate, k = 512, fp8"] == [[32768, 0.5]]
        assert not drawn(time).keys() & drawn(others_time).keys()
        assert "foveate, k = 512, bf16, 2 GPUs" in entries(pages[0])
        assert drawn(others_time)["paper: chunked, k = 1,024"][-1] == [1048576, 31973]
        assert drawn(memory)["paper: chunked, k = 512"][-1] == [1048576, pytest.approx(6.21 * 2**30 / 1e9)]

    def test_tiles_of_each_length(self, pages_of, tmp_path):
        pages = pages_of(figure)
        rows = [of_study("key_chunk", value, tokens) for tokens in (16384, 262144) for value in (1024, 4096)]
        rows += [of_study("MB of scores held", value, ms=value) for value in (64, 2048)]
        csa_plots.tiles(rows, tmp_path / "a.png")
        time, memory, held, _ = pages[0].axes
        assert drawn(time)["chunked, 262,144 tokens"] == [[1024, 250], [4096, 250]]
        assert drawn(memory)["chunked, 16,384 tokens"] == [[1024, 1.5], [4096, 1.5]]
        assert drawn(held)["fused, 262,144 tokens"] == [[64, 64], [2048, 2048]]
        assert len(drawn(time)["paper: chunked, 262,144 tokens"]) == 5

    @pytest.mark.parametrize("file", ["indexer.jsonl", "indexer-study.jsonl"])
    def test_from_rows_to_a_picture(self, tmp_path, file):
        csa_plots.main(RESULTS / file, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows in this file"),
        ("{}", "1: not a row of foveate bench indexer"),
        ("[1]", "1: not a row of foveate bench indexer"),
        (json.dumps({"bench": "indexer", "case": {}}), "1: not a row of foveate bench indexer"),
        (json.dumps(of_indexer() | {"bench": "csa"}), "1: not a row of foveate bench indexer"),
    ],
)
def test_files_of_something_else(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        read_bench([tmp_path / "a.jsonl"], "indexer")
