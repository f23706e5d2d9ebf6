import io
import itertools

import pytest
from rich.console import Console

from foveate.cli.terminal import WIDTH
from foveate.lab.report import terminal


def row(spec="dense", **more):
    name = spec.partition(":")[0]
    return {
        "method": name,
        "spec": spec,
        "task": "niah",
        "split": "single",
        "length": 16384,
        "n": 200,
        "model": "smollm2-135m",
        "dtype": "bfloat16",
        "run": {"device": "cuda"},
        "batch_size": 8,
        "metrics": {"string_match": {"value": 100.0, "low": 100.0, "high": 100.0}},
        "score": 100.0,
        "low": 100.0,
        "high": 100.0,
        "ceiling": 100.0,
        "diff_to_dense": 0.0,
        "diff_low": 0.0,
        "diff_high": 0.0,
        "keys_read_share": 1.0,
        "kv_bytes_per_step": 1_234_567_890.0,
        "resident_bytes": 50_100_000,
        "prefill_ms": 1284.0,
        "decode_ms_per_token": 123.4,
        "timing": "generate",
        "notes": [],
        "examples": [
            {"id": "0", "gold": ["1234567"], "answer": "It is\n1234567"},
            {"id": "1", "gold": [], "answer": ""},
        ],
        **more,
    }


LESS = {"kv_bytes_per_step": 1_000_000.0, "keys_read_share": 0.1}


def printed(renderable, width=WIDTH):
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(renderable)
    return stream.getvalue()


WORST = row(
    "luka:compressor=attention,page_size=16,prior=0.25,top_k=0.125",
    score=0.0,
    low=0.0,
    high=0.0,
    diff_to_dense=-100.0,
    diff_low=-100.0,
    diff_high=-100.0,
    notes=["sliding-window layers stay as they are"],
)


@pytest.mark.parametrize(
    ("width", "gone"),
    [
        (120, []),
        (100, []),
        (80, ["prefill", "KV/step"]),
        (60, ["prefill", "KV/step", "resident", "time/token"]),
        (40, ["prefill", "KV/step", "resident", "time/token", "keys read", "Δ to dense"]),
    ],
)
def test_the_method_comes_first_and_whole_and_other_columns_give_way(width, gone):
    rows = [row(), WORST, row("h2o:top_k=0.25"), WORST | {"spec": f"{WORST['spec']},window=512"}]
    lines = printed(terminal.Comparison(rows), width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    assert "niah / single · 16K tokens · 200 items · smollm2-135m · bfloat16 · cuda · batch 8" in " ".join(text.split())
    body = next(number for number, line in enumerate(lines) if "───" in line)
    names = [line.split("  ")[0].strip() for line in lines[body + 1 :] if line[1:2].strip()]
    assert names[:4] == ["dense", "luka #1", "h2o:top_k=0.25", "luka #2"]
    joined = "".join(text.split())
    assert f"luka#1is{WORST['spec']}luka#2is{WORST['spec']},window=512" in joined
    figures = {
        "prefill": "1.28 s",
        "KV/step": "1.2 GB",
        "resident": "50.1 MB",
        "time/token": "123.4 ms",
        "keys read": "100.0 %",
        "Δ to dense": "[-100.0, -100.0]",
    }
    assert [name for name, cell in figures.items() if cell not in text] == gone
    assert "[100.0, 100.0]" in text
    told = f"no room for {', '.join(gone)}: foveate report shows all"
    assert (told in " ".join(text.split())) == bool(gone)
    assert "luka#1,luka#2:sliding-windowlayersstayastheyare" in joined


def test_the_verdict_stands_below_the_table_with_the_names_of_the_table():
    few = {"n": 12, "item_values": {"string_match": [1.0] * 12}}
    text = " ".join(printed(terminal.Comparison([row(**few), row("luka:" + WORST["spec"][5:], **few | LESS)])).split())
    assert (
        "No method is shown to be within a point of dense attention (100.0, n = 12). luka is nearest, at +0.0" in text
    )
    assert "about 370 items would show it" in text
    nothing = {"score": 0.0, "low": 0.0, "n": 4}
    text = " ".join(printed(terminal.Comparison([row(**nothing), row("h2o", **nothing)])).split())
    assert "Dense attention answers none of 4 items, so they compare nothing" in text


def test_a_column_without_a_value_gives_way_first():
    rows = [row(decode_ms_per_token=None), WORST | {"decode_ms_per_token": None}]
    text = printed(terminal.Comparison(rows), 76)
    assert "no room for time/token: " in text
    assert "1.28 s" in text


def test_a_long_spec_goes_by_its_method_and_stands_below():
    lines = printed(terminal.Comparison([row(), WORST])).splitlines()
    assert any(line.startswith(" luka ") for line in lines)
    assert f"luka is {WORST['spec']}" in lines


def test_a_name_is_of_one_row_alone():
    """Short specs are their own names, and no long one goes by a name that is taken."""
    long = WORST["spec"]
    specs = ["luka", "luka:top_k=3", long, f"{long},window=512", "h2o", "h2o:top_k=0.25,window=32,sinks=4"]
    for number in range(1, len(specs) + 1):
        for some in itertools.permutations(specs, number):
            names = terminal.short_names([{"spec": spec, "method": spec.partition(":")[0]} for spec in some])
            assert len(set(names)) == number
            for name, spec in zip(names, some):
                assert name == spec if len(spec) <= 20 else name not in some


def test_the_peak_stands_below_what_stays():
    lines = printed(terminal.Comparison([row(), WORST | {"cache_peak_bytes": 80_200_000}])).splitlines()
    above = next(number for number, line in enumerate(lines) if "80.2 MB" in line) - 1
    assert lines[above].index("50.1 MB") == lines[above + 1].index("80.2 MB")
    assert any("/peak" in line for line in lines)
    assert max(map(len, lines)) <= 100
    assert "after an answer, and the most that it held" in " ".join(" ".join(lines).split())
    assert "peak" not in printed(terminal.Comparison([row(), WORST]))


def test_the_ceiling_and_further_metrics_stand_below():
    metrics = {"em_paper": {"value": 30.0}, "em": {"value": 12.5}, "f1": {"value": 20.25}}
    text = printed(terminal.Comparison([row(metrics=metrics, ceiling=61.67)]))
    assert "ceiling 61.7" in text
    assert "dense: em 12.5, f1 20.25" in text


def test_a_note_of_all_methods_stands_once_and_alone():
    text = printed(terminal.Comparison([row(notes=["a note"]), row("h2o", notes=["a note"])]))
    assert text.count("a note") == 1
    assert "h2o: a note" not in text


def test_what_was_not_measured_is_a_dash():
    text = printed(terminal.Comparison([row(keys_read_share=None, kv_bytes_per_step=None, timing="teacher-forced")]))
    assert "123.4" not in text
    assert text.count("–") == 5  # in "0–100", the difference of dense to itself, keys, bytes, time


def test_a_shared_prompt_has_no_prefill_time_and_says_why():
    shared = {"prefill_ms": None, "timing": "generate, shared prompt"}
    text = printed(terminal.Comparison([row(**shared), row("streaming")]))
    assert "methods without a prefill time shared one reading of each prompt; --no-share-prompt times" in text
    assert text.count("1.28 s") == 1
    assert text.count("123.4 ms") == 2
    assert "is no speed" not in text
    assert "--no-share-prompt" not in printed(terminal.Comparison([row()]))


def test_small_scores_get_a_digit_more():
    text = printed(
        terminal.Comparison(
            [
                row(score=3.046, low=2.6, high=3.9),
                row("h2o", score=2.992, low=2.6, high=3.8, diff_to_dense=-0.054, diff_high=-0.001),
            ]
        )
    )
    assert "3.05" in text
    assert "-0.05" in text
    assert "[+0.00, +0.00]" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (5e13, "50000 GB")],
)
def test_sizes(count, text):
    assert terminal.size(count) == text


def test_reading():
    summary = {
        "decode_steps": 9,
        "keys_read_share": 0.25,
        "kv_bytes_per_step": 2_600_000.0,
        "resident_bytes": 6_000_000,
        "tokens_evicted": 36000,
        "tokens_evicted_per_sequence": 1200.0,
        "pages_refined": 0,
        "notes": ["a note"],
    }
    assert terminal.reading(summary) == (
        "9 decode steps · 25.0 % of the keys read (2.6 MB a step) · 6.0 MB resident · "
        "1,200 tokens of each sequence evicted (mean over layers) · a note"
    )
    assert "keys" not in terminal.reading({**summary, "decode_steps": 0})
    assert " · 6.0 MB resident (peak 9.0 MB) · " in terminal.reading({**summary, "cache_peak_bytes": 9_000_000})


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "–"),
        (0.0023019682793390182, "2.30 µs"),
        (0.0307, "30.7 µs"),
        (0.68992, "690 µs"),
        (0.99961, "1.00 ms"),
        (1.446, "1.45 ms"),
        (14.546, "14.5 ms"),
        (2500.0, "2.50 s"),
    ],
)
def test_short_times_keep_their_digits(milliseconds, text):
    assert terminal.time(milliseconds) == text


def test_recall_is_below_the_table():
    rows = [row(recall={"0": 1.0, "1": 1.0}), row("h2o", recall={"0": 0.5, "1": 0.25}), row("tova", recall=None)]
    text = " ".join(printed(terminal.Comparison(rows)).split())
    assert "recall: the share of exact attention that the tokens hold that a method reads, the mean over layers" in text
    assert "h2o: recall 37.5 %, least in layer 1, 25.0 %" in text
    assert "tova: recall" not in text
    assert "recall" not in printed(terminal.Comparison([row(), row("h2o")]))
