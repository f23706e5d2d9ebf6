"""What decoding by a method gives a server: vLLM with foveate's plugin beside vLLM's own FlashAttention, in one run.

    python -m benchmarks.serving --out runs/serving.jsonl
    python -m benchmarks.serving --tiny --out runs/tiny.jsonl     # on a CPU: does it run?

Needs vLLM (docs/guide/serve.md). The model has the shape of Llama-3.1-8B and random weights, or is the folder --model.
An engine at a time runs in a process of its own. A case is so many requests of so many tokens: their prompts are read
in chunks, and when all of them decode, --steps steps are timed. A row has milliseconds and tokens a second of these,
the time to the first token of a request alone, and the share of keys that was read. A case for which the engine has too
little memory is left out, and named. With --kv-cache-dtype fp8 both hold keys and values in eight bits. Which model
runner vLLM uses stands in the row; VLLM_USE_V2_MODEL_RUNNER=0 in the environment chooses the first. With --ranks the
model is spread over as many GPUs, by NCCL's all-reduce.

With --lossless 4 the method drafts four tokens and vLLM's attention verifies them. A row's times are then of a token: a
step's, over the tokens that it gives. Random weights have no text to write, so --accept gives the share of drafts that
are accepted. With --task a --model answers about real texts (benchmarks/lossless.py), and a row has the share of the
answers that equals vLLM's own.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import lossless
from foveate.integrations.transformers import model_folder
from foveate.lab.results import measurements
from foveate.methods import parse

METHODS = [f"kascade:anchors={number}" for number in (10, 5)]
CASES = ["131072x1", "65536x4", "32768x16", "8192x1", "8192x16"]
"""Tokens and requests."""
SHAPES = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
}
BASELINE = "vllm"
PROGRAM = ("-m", "benchmarks.serving")
WARM, ROOM = 16, 4096
"""Steps before those that are timed; tokens that a request may generate."""
_USUAL = {"ranks": 1, "dense_below": None, "lossless": 0, "accept": None, "task": None}
"""What a row's case names only where it is otherwise."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a folder of Hugging Face; otherwise a shape with random weights")
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default=next(iter(SHAPES)))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and by default tiny cases")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs over which the model is spread (tensor parallelism)")
    parser.add_argument("--dense-below", type=int, help="of the methods, see docs/guide/serve.md; by default their own")
    parser.add_argument("--method", action="append", help="by default Kascade with ten anchors, and with five")
    parser.add_argument("--case", action="append", help=f"by default {', '.join(CASES)}")
    parser.add_argument(
        "--kv-cache-dtype", action="append", choices=("auto", "fp8"), help="of vLLM, by default auto; or both"
    )
    parser.add_argument(
        "--lossless", action="append", type=int, help="tokens of a draft that is verified, 0 for none; by default 0"
    )
    parser.add_argument("--accept", type=float, help="of --lossless: the share of drafts that are accepted by lot")
    parser.add_argument("--task", choices=lossless.prompts(), help="of --model: what prompts are; by default random")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="times that a first token is timed")
    parser.add_argument("--memory", type=float, default=0.94, help="share of the GPU's memory")
    given = parser.parse_args(arguments)
    measurements.check_out(given.out, "serving")
    cases = [tuple(map(int, case.split("x"))) for case in given.case or (["96x1", "48x3"] if given.tiny else CASES)]
    methods = given.method or ([METHODS[1]] if given.tiny else METHODS)
    with tempfile.TemporaryDirectory() as folder:
        name = "tiny" if given.tiny else given.shape
        job = {"model": given.model or written(Path(folder), name, cases), "dummy": given.model is None}
        job |= {"cases": cases, "steps": given.steps, "repeats": given.repeats, "memory": given.memory}
        job |= {"ranks": given.ranks, "dense_below": given.dense_below, "accept": given.accept, "task": given.task}
        lengths = given.lossless or [0]
        job |= {"longest_draft": max(lengths)}
        name = Path(given.model).name if given.model else f"{name}-shape"
        methods = [settled(given.model, method) if given.model else method for method in methods]
        for dtype in given.kv_cache_dtype or ["auto"]:
            job |= {"kv_cache_dtype": dtype}
            own = run(job | {"method": None})
            for method, length in itertools.product(methods, lengths):
                job |= {"lossless": length}
                found = run(job | {"method": method})
                rows = [_row(name, method, job, case, found[case], own[case]) for case in found if case in own]
                measurements.write(given.out, rows)
                for row in rows:
                    print(_line(row), flush=True)


def run(job: dict[str, Any], program: Sequence[str] = PROGRAM) -> dict[str, dict[str, Any]]:
    """What an engine's process has measured, by case."""
    command = [sys.executable, *program, "--measure"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | dict(os.environ)
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if job.get("ranks", 1) > 1:  # this process may have used CUDA, which a fork does not survive
        environment |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    environment |= {"CUDA_VISIBLE_DEVICES": str(job["gpu"])} if "gpu" in job else {}
    done = subprocess.run(
        command, input=json.dumps(job), env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the engine's process ended with {done.returncode}; it wrote:\n{done.stdout[-8000:]}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])  # workers write, too


def settled(model: Path | str, spec: str) -> str:
    """A spec that names the calibration which comes with foveate for a model folder, if the method is to use it."""
    own = model_folder.method_for(Path(model), parse(spec))
    return own.spec if getattr(own, "calibration", "") and own != parse(spec) else spec


def written(folder: Path, name: str, cases: list[tuple[int, int]]) -> str:
    """A folder with the configuration of a shape, for contexts as long as the cases need."""
    most = max(tokens for tokens, _ in cases) + ROOM
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, **SHAPES[name]}
    config |= {"max_position_embeddings": most, "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16"}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def _row(
    name: str, method: str, job: dict[str, Any], case: str, found: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    tokens, batch = map(int, case.split("x"))
    if found["runner"] != own["runner"]:
        raise RuntimeError(f"vLLM ran {method} by model runner {found['runner']}, its own by {own['runner']}")
    row = measurements.speed_row(
        "serving",
        {
            "model": name,
            "method": method,
            "tokens": tokens,
            "batch": batch,
            "kv_cache_dtype": job["kv_cache_dtype"],
            "runner": found["runner"],
            **unusual(job),
        },
        "cuda" if found["device"] == "cuda" else "cpu",
        found["ms"],
        ("vllm-flash-attention" if found["device"] == "cuda" else BASELINE, own["ms"]),
        peak_bytes=found["peak_bytes"],
        ms_all=found["ms_all"],
        tokens_per_s=1000 * batch / found["ms"],
        first_token_ms=found["first_token_ms"],
        baseline_first_token_ms=own["first_token_ms"],
        keys_read_share=found["keys_read_share"],
        **({"tokens_a_step": found["tokens_a_step"]} if job["lossless"] else {}),
        **({"equal": lossless.alike(found["answers"], own["answers"])} if job["task"] else {}),
    )
    return row


def unusual(job: dict[str, Any]) -> dict[str, Any]:
    """What a row's case names of a job besides."""
    return {key: job[key] for key, usual in _USUAL.items() if job.get(key, usual) != usual}


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    times = f"{row['ms']:8.2f} ms a token, {row['speedup']:.2f} times as fast as {row['baseline']}"
    first = f"first token {row['first_token_ms']:.0f} ms ({row['baseline_first_token_ms']:.0f})"
    engine = f"{case['kv_cache_dtype']}, {case['runner']}, {case.get('ranks', 1)} GPUs"
    if "lossless" in case:
        engine += f", drafts of {case['lossless']}, {row['tokens_a_step']:.2f} tokens a step"
    return f"{case['tokens']:7} x {case['batch']:<3} {case['method']} ({engine}): {times}; {first}"


# In an engine's process


def engine(job: dict[str, Any], **how: Any) -> Any:
    """vLLM by a job's method, or its own attention for None; ``how`` are its options."""
    import torch
    from vllm import LLM

    cuda = torch.cuda.is_available()
    how |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    how |= (
        {"gpu_memory_utilization": job["memory"], "max_num_batched_tokens": 8192} if cuda else {"enforce_eager": True}
    )
    how |= {"load_format": "dummy"} if job["dummy"] else {}
    how |= {"kv_cache_dtype": job.get("kv_cache_dtype", "auto")}
    if job.get("ranks", 1) > 1:
        how |= {"tensor_parallel_size": job["ranks"], "disable_custom_all_reduce": True}
        how |= {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    if job["method"] is not None:
        settings = {"method": job["method"]}
        settings |= {} if job.get("dense_below") is None else {"dense_below": job["dense_below"]}
        if length := job.get("lossless"):
            settings["lossless"] = True
            how |= {"async_scheduling": True, "speculative_config": _drafts(job, length)}
        how |= {"attention_backend": "CUSTOM", "additional_config": {"foveate": settings}}
    elif cuda:
        how |= {"attention_backend": "FLASH_ATTN"}
    return LLM(model=job["model"], **how)


def _drafts(job: dict[str, Any], length: int) -> dict[str, Any]:
    """vLLM's options for drafts of the model itself."""
    drafts = {"method": "draft_model", "model": job["model"], "num_speculative_tokens": length}
    drafts |= {"draft_sample_method": "probabilistic"}
    if (share := job.get("accept")) is None:
        return drafts
    rates = [share ** (number + 1) for number in range(length)]
    return drafts | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def runner_of(llm: Any) -> str:
    """The model runner of an engine."""
    return "v2" if getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False) else "v1"


def measure(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import torch

    cuda = torch.cuda.is_available()
    longest, most = (max(case[n] for case in job["cases"]) for n in (0, 1))
    step = 8 if most <= 256 else 16
    most = most if most in (1, 2, 4) else -(-most // step) * step  # a size of which vLLM captures a graph
    llm = engine(job, max_model_len=longest + ROOM, max_num_seqs=most, enable_prefix_caching=False)
    config = llm.llm_engine.vllm_config
    room = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    found = {}
    for tokens, batch in job["cases"]:
        needed = batch * (tokens + (WARM + job["steps"]) * (1 + job["longest_draft"]))
        if needed > room:
            print(f"{tokens} x {batch}: {needed} tokens need more memory than there is, {room}", file=sys.stderr)
            continue
        before = _keys(llm)
        prompts = _prompts(job, tokens, batch)
        first = [_decode(llm, prompts[:1], 0)[0] for _ in range(job["repeats"])]
        _, steps, tokens_a_step, answers = _decode(llm, prompts, job["steps"])
        read, available = (after - now for after, now in zip(_keys(llm), before))
        found[f"{tokens}x{batch}"] = {
            "ms": sorted(steps)[len(steps) // 2] / tokens_a_step,
            "ms_all": sum(steps) / len(steps) / tokens_a_step,
            "tokens_a_step": tokens_a_step,
            "answers": answers if job["task"] else None,
            "first_token_ms": min(first),
            "keys_read_share": read / available if available else None,
            "peak_bytes": None if job["ranks"] > 1 else torch.cuda.max_memory_allocated() if cuda else 0,
            "device": "cuda" if cuda else "cpu",
            "runner": runner_of(llm),
        }
    return found


def _prompts(job: dict[str, Any], tokens: int, batch: int) -> list[list[int]]:
    """Ids of the prompts of a case."""
    import torch

    if job["task"] is None:
        generator = torch.Generator().manual_seed(tokens)
        return [torch.randint(3, 500, (tokens,), generator=generator).tolist() for _ in range(batch)]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    return [lossless.prompt(tokenizer, *lossless.prompts()[job["task"]](row), tokens) for row in range(batch)]


def _decode(llm: Any, prompts: list[list[int]], steps: int) -> tuple[float, list[float], float, list[list[int]]]:
    """Milliseconds to the first token of the first request, milliseconds of each timed step (in which all requests
    decode), the tokens that a request gains in such a step, and the answers so far."""
    from vllm import SamplingParams

    engine, batch = llm.llm_engine, len(prompts)
    sampling = SamplingParams(temperature=0, max_tokens=ROOM, ignore_eos=True, detokenize=False)
    names = [f"{len(prompts[0])}-{batch}-{number}-{time.monotonic_ns()}" for number in range(batch)]
    start = time.perf_counter()
    for name, ids in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    first, ended, answers = None, [], {}
    while first is None or len(ended) < steps + (WARM if steps else 0):
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"requests of {ROOM} tokens ended before {steps} steps were timed: give fewer --steps")
        outs = engine.step()
        now = time.perf_counter()
        answers |= {out.request_id: list(out.outputs[0].token_ids) for out in outs}
        if first is None and any(answers.values()):
            first = 1000 * (now - start)
        elif len(answers) == batch and all(answers.values()) and outs:
            ended.append((now, sum(map(len, answers.values()))))
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    timed = ended[WARM - 1 :]
    times = [1000 * (after[0] - before[0]) for before, after in itertools.pairwise(timed)]
    tokens_a_step = (timed[-1][1] - timed[0][1]) / len(times) / batch if times else 0.0
    return first, times, tokens_a_step, [answers.get(name, []) for name in names]


def _keys(llm: Any) -> tuple[float, float]:
    """Keys read and available in decode steps so far, as the plugin has published them: a few short steps make it."""
    from foveate.integrations.vllm import published

    time.sleep(1)  # it publishes twice a second, before a step, what it had counted by the one before
    _decode(llm, [list(range(3, 19))], 4)

    found = {one.name: one.samples[0].value for one in published.Collector().collect()}
    return found.get("foveate:keys_read", 0.0), found.get("foveate:keys_available", 0.0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure(json.load(sys.stdin))))
    else:
        main()
