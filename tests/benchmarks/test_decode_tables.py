"""Tables of decode steps: models in short, speed-ups, Kascade beside its paper."""

import pytest

from benchmarks.csa_tables import decode_kascade
from benchmarks.table_kinds import decode_kinds, decode_models, decode_speedups
from foveate.errors import UserError
from tests.lab.report.test_decode_report import KASCADE, LUKA, cells, kind, of_layers, of_model


class TestModels:
    def test_what_a_user_sees_of_a_model(self):
        stats = {"keys_read_share": 0.191, "resident_bytes": 18_245_222_400}
        more = {"tokens_per_s": 101.42, "prefill_ms": 17369.0, "peak_bytes": 35_353_852_928}
        own = of_model("transformers-sdpa", 0.44, weights="random", dtype="bfloat16") | more | {"stats": None}
        rows = [of_model(KASCADE, 1.44, weights="random", dtype="bfloat16") | more | {"stats": stats}, own]
        text = decode_models([*rows, of_layers(KASCADE, 131072, 1, 3.3)])
        assert text.startswith("llama-3.1-8b (random weights), bfloat16, 1 × 131,000 tokens (NVIDIA H100 80GB HBM3;")
        first, second = cells(text)
        assert list(first.values()) == [
            f"`{KASCADE}`", "19.1 %", "10.00", "101.4", "1.44×", "18.25 GB", "35.35 GB"
        ]  # fmt: skip
        assert (second["method"], second["keys read"], second["cache"]) == ("`transformers-sdpa`", "", "")


class TestSpeedups:
    def test_a_line_for_each_case_and_a_column_for_each_method(self):
        rows = [
            of_model("luka", 1.5, liger=True),
            of_model("luka", 0.94, context=2048, dense_below="auto") | {"stats": {"keys_read_share": 1.0}},
            of_layers(LUKA, 131072, 32, 13.0),
            of_layers(LUKA, 8192, 32, 7.0),
            of_layers(KASCADE, 131072, 1, 3.3),
        ]
        text = decode_speedups(rows)
        assert text.startswith("NVIDIA H100 80GB HBM3; torch 2, transformers 5; commit abc:")
        found = cells(text)
        assert [next(iter(line.values())) for line in found] == [
            "attention of a layer, 1 × 128K tokens",
            "attention of a layer, 32 × 8K tokens",
            "attention of a layer, 32 × 128K tokens",
            "llama-3.1-8b, whole steps, 1 × 2K tokens, dense below auto",
            "llama-3.1-8b, whole steps, 1 × 131,000 tokens, Liger's kernels",
        ]
        assert [line["`luka`"] for line in found] == ["–", "–", "–", "0.94× (reads all)", "1.50×"]
        assert [line[f"`{KASCADE}`"] for line in found] == ["3.30×", "–", "–", "–", "–"]

    def test_rows_that_a_line_cannot_tell_apart(self):
        other = of_layers(KASCADE, 8192, 1, 2.0)
        other["case"]["heads"] = 16
        with pytest.raises(UserError, match="two rows of attention of a layer, 1 × 8K tokens"):
            decode_speedups([of_layers(KASCADE, 8192, 1, 3.0), other])


class TestKascade:
    LAYERS = {"dense, choosing": kind(1, 12.0), "reading": kind(27, 1.125), "choosing": kind(4, 8.0, score=6.5)}

    def rows(self, *methods, context=131072, batch=64):
        rows = [of_layers("dense", context, batch, 0.9) | {"ms": 12.0, "layers": None}]
        rows[0]["case"]["method"] = "flash-attention-3"
        for method in methods:
            row = of_layers(method, context, batch, 4.5, layers=self.LAYERS) | {"recall": 0.9785}
            row["case"]["share"] = 0.2 if "top_k=0.2" in method else 0.1
            rows.append(row)
        return rows

    def test_beside_the_paper(self):
        rows = self.rows(f"{KASCADE},score_keys=fp8", f"{KASCADE},top_k=0.2", KASCADE)
        tenth, fifth, eighths = cells(decode_kascade([*rows, *self.rows(KASCADE, batch=32)]))
        assert tenth == {
            "keys read": "10 %",
            "tokens": "128K",
            "FlashAttention-3": "11.68 / 12.00",
            "layer 0": "14.08 / 12.00",
            "choosing": "10.78 / 8.00",
            "reading": "1.24 / 1.12",
            "mean": "2.83 / 2.00",
            "over FlashAttention-3": "4.12 / 6.00",
            "over the fastest dense": "4.50",
        }
        assert (fifth["keys read"], fifth["mean"]) == ("20 %", "4.01 / 2.00")
        assert eighths["keys read"] == "10 %, chosen by fp8 keys (recall 0.979)"  # which the paper does not do
        assert (eighths["choosing"], eighths["over FlashAttention-3"]) == ("– / 8.00", "– / 6.00")

    def test_layer_0_by_pages(self):
        method = f"{KASCADE},first_layer=pages".replace("kascade", "kascade_pages")
        rows = self.rows(method)
        layers = dict(self.LAYERS)
        rows[1]["layers"] = {
            "pages, choosing": kind(1, 5.0),
            **{name: layers[name] for name in ("reading", "choosing")},
        }
        (line,) = cells(decode_kascade(rows))
        assert line["keys read"] == "10 %, chosen by pages (recall 0.979), layer 0 by pages"
        assert line["layer 0"] == "– / 5.00"

    def test_a_length_that_the_paper_does_not_have(self):
        (line,) = cells(decode_kascade(self.rows(KASCADE, context=4096)))
        assert line["mean"] == "– / 2.00"

    def test_kinds_of_layers(self):
        first, reading, choosing = cells(decode_kinds(self.rows(KASCADE)[1:]))
        assert (first["kind of layer"], first["layers"], first["ms"]) == ("dense, choosing", "1", "12.000")
        assert (reading["score"], choosing["score"]) == ("0.000", "6.500")
