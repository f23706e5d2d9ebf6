"""What a server feels like under load: requests of mixed lengths that arrive at a rate, in vLLM with foveate's plugin
beside vLLM's own attention.

    python -m benchmarks.serving_load --out runs/load.jsonl --requests 40 --least 8192 --most 65536 --rows 16 \
        --rate 0.35 --rate 0.5 --rate 1 --seed 1 --seed 2 --method kascade:anchors=10
    python -m benchmarks.serving_load --tiny --out runs/tiny-load.jsonl     # on a CPU: does it hold?

Needs vLLM (docs/guide/serve.md). The model is that of `serving.py`. An engine runs in a process of its own. For each
rate and --seed, --requests arrive at random times, with prompts of --least to --most tokens, evenly spread by the
logarithm, and --new tokens to generate. Times count from a request's arrival, waiting included. A row has their
percentiles, the number of requests that failed, and by how much the process's memory has grown during the pass. A first
pass, which is not measured, compiles kernels and uses every block of the KV cache. --lossless and --accept are those of
`serving.py`.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import serving
from foveate.lab.results import measurements

METHODS = [serving.METHODS[1], "pages:top_k=0.1,weighted=false"]
PROGRAM = ("-m", "benchmarks.serving_load")
PERCENTILES = (50, 90, 99)
BLOCK = 32
"""Tokens of a block of the KV cache on a CPU."""
TINY = {"requests": 40, "rates": [2.0, 4.0, 8.0], "least": 16, "most": 256, "new": 24, "rows": 8}
FULL = {"requests": 500, "rates": [1.0, 4.0, 16.0], "least": 512, "most": 65536, "new": 256, "rows": 64}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a folder of Hugging Face; otherwise the shape of Llama-3.1-8B")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and by default few and short requests")
    parser.add_argument("--method", action="append", help=f"by default {' and '.join(METHODS)}")
    parser.add_argument("--rate", action="append", type=float, help="requests a second; may be given several times")
    parser.add_argument("--seed", action="append", type=int, help="of arrivals and lengths, by default 1; or several")
    parser.add_argument("--requests", type=int, help="of each rate")
    parser.add_argument("--least", type=int, help="tokens of the shortest prompt")
    parser.add_argument("--most", type=int, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, help="tokens to generate")
    parser.add_argument("--rows", type=int, help="requests that the engine runs at a time")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of both engines")
    parser.add_argument("--lossless", type=int, default=0, help="tokens of a draft that is verified, 0 for none")
    parser.add_argument("--accept", type=float, help="of --lossless: the share of drafts that are accepted by lot")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    given = parser.parse_args(arguments)
    measurements.check_out(given.out, "serving-load")
    asked = {name: value for name in TINY if (value := vars(given).get(name)) is not None}
    job = (TINY if given.tiny else FULL) | asked | ({"rates": given.rate} if given.rate else {})
    if job["new"] < 2:
        parser.error(f"--new must be at least 2, between which a token's time is, not {job['new']}")
    with tempfile.TemporaryDirectory() as folder:
        shape = "tiny" if given.tiny else "llama-3.1-8b"
        model = given.model or serving.written(Path(folder), shape, [(job["most"] + job["new"], 1)])
        name = Path(given.model).name if given.model else f"{shape}-shape"
        job |= {"model": model, "dummy": given.model is None, "memory": given.memory, "seeds": given.seed or [1]}
        job |= {"kv_cache_dtype": given.kv_cache_dtype, "lossless": given.lossless, "accept": given.accept}
        own = serving.run(job | {"method": None}, PROGRAM)
        for method in given.method or METHODS:
            found = serving.run(job | {"method": method}, PROGRAM)
            passes = [(rate, seed) for rate in job["rates"] for seed in job["seeds"]]
            rows = [_row(name, method, job, one, found[_name(*one)], own[_name(*one)]) for one in passes]
            measurements.write(given.out, rows)
            for row in rows:
                print(_line(row), flush=True)


def _name(rate: float, seed: int) -> str:
    return f"{rate:g} a second, seed {seed}"


def _row(
    name: str, method: str, job: dict[str, Any], arrivals: tuple[float, int], found: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    if found["runner"] != own["runner"]:
        raise RuntimeError(f"vLLM ran {method} by model runner {found['runner']}, its own by {own['runner']}")
    case = dict(zip(("rate", "seed"), arrivals))
    case |= {key: job[key] for key in ("requests", "least", "most", "new", "rows", "kv_cache_dtype")}
    case |= {"runner": found.pop("runner")} | serving.unusual(job)
    device = found.pop("device")
    return measurements.speed_row(
        "serving-load",
        {"model": name, "method": method, **case},
        device,
        found["token_ms"][0],
        ("vllm-flash-attention" if device == "cuda" else serving.BASELINE, own["token_ms"][0]),
        percentiles=PERCENTILES,
        **found,
        **{
            f"baseline_{key}": own[key] for key in ("first_token_ms", "token_ms", "request_ms", "failed", "grown_bytes")
        },
    )


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    times = "; ".join(
        f"{what} {_spell(row[key])} ms ({_spell(row[f'baseline_{key}'])})"
        for key, what in (("first_token_ms", "first token"), ("token_ms", "a token"))
    )
    grown = f"{row['failed']} failed, memory grew by {row['grown_bytes'] / 2**20:.1f} MiB"
    engine = f"{case['kv_cache_dtype']}, {case['runner']}"
    return f"{_name(case['rate'], case['seed'])}, {case['method']} ({engine}): {times} at {PERCENTILES} %; {grown}"


def _spell(times: list[float]) -> str:
    return " / ".join(f"{x:.0f}" for x in times)


# In an engine's process


def measure(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import torch

    cuda, longest = torch.cuda.is_available(), job["most"] + job["new"]
    how = {"max_model_len": longest, "max_num_seqs": job["rows"]}
    if not cuda:  # so few blocks that the first pass uses all of them
        how |= {"block_size": BLOCK}
        how["num_gpu_blocks_override"] = -(-2 * longest * job["rows"] // BLOCK)
    llm = serving.engine(job, **how)
    _pass(llm.llm_engine, job, math.inf, seed=0)
    found = {}
    for rate, seed in ((rate, seed) for rate in job["rates"] for seed in job["seeds"]):
        before = _memory(cuda)
        one = found[_name(rate, seed)] = _pass(llm.llm_engine, job, rate, seed)
        one |= {"grown_bytes": _memory(cuda) - before, "device": "cuda" if cuda else "cpu"}
        one |= {"runner": serving.runner_of(llm), "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}
    return found


def _memory(cuda: bool) -> int:
    """Bytes of this process on the GPU, or else in main memory."""
    import gc

    import psutil
    import torch

    gc.collect()
    return torch.cuda.memory_allocated() if cuda else psutil.Process().memory_info().rss


def _pass(engine: Any, job: dict[str, Any], rate: float, seed: int) -> dict[str, Any]:
    """Requests that arrive at a rate: percentiles of times in milliseconds, and how many failed."""
    from vllm import SamplingParams

    draw, due = random.Random(seed), 0.0  # the same lengths at every rate
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, detokenize=False)
    waiting = []
    for number in range(job["requests"]):
        length = round(math.exp(draw.uniform(math.log(job["least"]), math.log(job["most"]))))
        waiting.append((due, f"{seed}-{number}", [draw.randrange(3, 500) for _ in range(length)]))
        due += draw.expovariate(1.0) / rate
    arrived, first, last, counts, start = {}, {}, {}, {}, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            due, name, ids = waiting.pop(0)
            arrived[name] = due
            engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - start)) if waiting else 0.0)
            continue
        for out in engine.step():
            name, tokens = out.request_id, len(out.outputs[0].token_ids)
            if tokens > counts.get(name, 0):
                counts[name], last[name] = tokens, time.perf_counter() - start
                first.setdefault(name, last[name])
    done = [name for name, tokens in counts.items() if tokens == job["new"]]
    if not done:
        raise RuntimeError(f"none of {job['requests']} requests at {rate} a second was answered")
    times = {
        "first_token_ms": [first[name] - arrived[name] for name in done],
        "token_ms": [(last[name] - first[name]) / (job["new"] - 1) for name in done],
        "request_ms": [last[name] - arrived[name] for name in done],
    }
    found = {key: [1000 * _percentile(sorted(x), share) for share in PERCENTILES] for key, x in times.items()}
    return found | {"failed": job["requests"] - len(done), "seconds": time.perf_counter() - start}


def _percentile(ordered: list[float], share: int) -> float:
    """The least of the numbers that so many percent do not exceed."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure(json.load(sys.stdin))))
    else:
        main()
