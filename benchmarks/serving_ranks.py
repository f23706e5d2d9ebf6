"""Tensor parallelism over two GPUs: do the ranks choose what one GPU chooses, and what does choosing together cost?

    python -m benchmarks.serving_ranks --out runs/ranks.jsonl            # keys that an anchor chooses, and its time
    python -m benchmarks.serving_ranks --tokens --model DIR --out runs/ranks.jsonl   # answers (needs vLLM)

Keys: an anchor of the 8B's shape scores random keys in bf16, all heads on one GPU, or half of the heads on each of two
GPUs, which sum their scores by NCCL before they choose. A row has milliseconds of scoring and choosing in a CUDA graph,
the same without the sum as its baseline, the bytes that are summed, and the share of the chosen keys that one GPU
chooses, too.

Tokens: a model continues passages of a novel greedily, with one GPU and with two, by vLLM's own attention and by a
method that reads a tenth of the keys; both engines of one GPU run at once. A row has the share of tokens that both give
before they first differ (``baseline_agreement`` of vLLM's own), and milliseconds of a generated token of two GPUs,
prompts included, over vLLM's own. Without ``--model`` the model is random, of eight KV heads, and so are its prompts.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import serving
from foveate.io import reading
from foveate.lab.evaluation.tasks import probes
from foveate.lab.results import measurements

PROGRAM = ("-m", "benchmarks.serving_ranks")
CASES = ["65536x1", "65536x4", "32768x8", "16384x16"]
"""Tokens and requests."""
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
RANKS, SHARE = 2, 0.1
METHOD, OF_MODELS = "kascade:top_k=0.1,min_k=64,anchors=4", "kascade:top_k=0.1"
PROMPTS, LENGTH, NEW = 48, 3000, 32


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", action="append", help=f"by default {', '.join(CASES)}")
    parser.add_argument("--tokens", action="store_true", help="compare answers of engines instead")
    parser.add_argument("--model", type=Path, help="with --tokens: a model's folder")
    given = parser.parse_args(arguments)
    measurements.check_out(given.out, "serving-ranks")
    if given.model is not None and not given.tokens:
        raise SystemExit("--model needs --tokens: keys are random")
    rows = (
        [_answers(given.model)]
        if given.tokens
        else _keys([tuple(map(int, case.split("x"))) for case in given.case or CASES])
    )
    measurements.write(given.out, rows)
    for row in rows:
        print(json.dumps({key: row[key] for key in ("case", "ms", "baseline_ms", "agreement", "summed_bytes")}))


# Keys


def _keys(cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_of_rank, (folder, cases), RANKS)
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return [_row({"what": "keys", "tokens": tokens, "batch": batch}, "cuda", *one) for (tokens, batch), one in found]


def _row(case: dict[str, Any], device: str, ms: float, own_ms: float, agreement: float, summed: int) -> dict[str, Any]:
    more = {"agreement": agreement, "summed_bytes": summed, "peak_bytes": None}
    return measurements.speed_row("serving-ranks", case | {"ranks": RANKS}, device, ms, ("one-rank", own_ms), **more)


def _of_rank(rank: int, folder: str, cases: list[tuple[int, int]]) -> None:
    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", f"file://{folder}/store", world_size=RANKS, rank=rank)
    found = [(case, _case(rank, *case)) for case in cases]
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def _case(rank: int, tokens: int, batch: int) -> tuple[float, float, float, int]:
    """Milliseconds of choosing together, and of one rank alone; the share of equal choices; the bytes of the sum."""
    import torch
    from torch import distributed

    from foveate import ops

    generator = torch.Generator("cuda").manual_seed(tokens + batch)
    how = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    blocks = batch * tokens // BLOCK
    q = 2 * torch.randn(batch, HEADS, 1, DIM, **how)  # so that a head attends to few keys
    k = torch.randn(blocks, KV_HEADS, BLOCK, DIM, **how)
    table = torch.randperm(blocks, device="cuda", generator=generator).int().view(batch, -1)
    lengths = torch.full((batch,), tokens, dtype=torch.int64, device="cuda")
    counts, most = (lengths * SHARE).long(), int(tokens * SHARE)

    def choose(q: Any, k: Any, together: bool) -> Any:
        kv = ops.KV(k, block_table=ops.BlockTable(table, tokens), lengths=lengths)
        mass = ops.pooled_mass(q, kv, logits=ops.Logits(DIM**-0.5), pooling="sqrt", pool="layer")
        if together:
            distributed.all_reduce(mass)
        return ops.topk_rows(mass, counts, most, lengths=lengths, dtype=torch.int32), mass

    heads, kv_heads = slice(rank * HEADS // RANKS, None), slice(rank * KV_HEADS // RANKS, None)
    own = q[:, heads][:, : HEADS // RANKS].contiguous(), k[:, kv_heads][:, : KV_HEADS // RANKS].contiguous()
    (chosen, mass), (expected, _) = choose(*own, True), choose(q, k, False)
    same = torch.zeros(batch, tokens, dtype=torch.int32, device="cuda")
    same.scatter_add_(1, chosen[:, 0].long(), torch.ones_like(chosen[:, 0]))
    share = float(same.gather(1, expected[:, 0].long()).float().mean())
    together, alone = (_timed(lambda one=one: choose(*own, one)) for one in (True, False))
    return together, alone, share, mass.numel() * mass.element_size()


def _timed(run: Any) -> float:
    """Milliseconds of a replay, the median of many."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return statistics.median(times[5:])


# Tokens


def _answers(model: Path | None) -> dict[str, Any]:
    method = METHOD if model is None else serving.settled(model, OF_MODELS)
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            _write(Path(folder))
        job = {"model": str(model or folder), "dummy": False, "memory": 0.5, "dense_below": 0}
        job["prompts"] = _random() if model is None else _read(model)
        of_one = [job | {"method": one, "ranks": 1, "gpu": gpu} for gpu, one in enumerate((None, method))]
        with ThreadPoolExecutor() as both:
            ones = list(both.map(lambda one: serving.run(one, PROGRAM), of_one))
        twos = [serving.run(job | {"method": one, "ranks": RANKS}, PROGRAM) for one in (None, method)]
    agreement = [statistics.mean(map(_common, one["tokens"], two["tokens"])) for one, two in zip(ones, twos)]
    own, ours = ({**two, "agreement": share} for two, share in zip(twos, agreement))
    case = {"what": "tokens", "method": method, "prompts": PROMPTS, "length": LENGTH, "new": NEW}
    case |= {} if model is None else {"model": model.resolve().name}
    row = _row(case, ours["device"], ours["ms"], own["ms"], ours["agreement"], 0)
    return row | {"baseline": serving.BASELINE, "baseline_agreement": own["agreement"]}


def _common(one: list[int], two: list[int]) -> float:
    """The share of tokens before the first that differs."""
    return next((n for n, (a, b) in enumerate(zip(one, two)) if a != b), len(one)) / len(one)


def _random() -> list[list[int]]:
    """Prompts of random tokens."""
    rng = random.Random(1)
    return [[rng.randrange(3, 4096) for _ in range(LENGTH)] for _ in range(PROMPTS)]


def _read(model: Path) -> list[list[int]]:
    """Passages of the novel that comes with foveate, each from another place."""
    import transformers

    (novel,) = reading.read_novels(probes.TEXT)
    ids = transformers.AutoTokenizer.from_pretrained(model)(novel.text, add_special_tokens=False)["input_ids"]
    starts = [n * (len(ids) - LENGTH) // (PROMPTS - 1) for n in range(PROMPTS)]
    return [ids[start : start + LENGTH] for start in starts]


def _write(folder: Path) -> None:
    """A random model whose attention is far from uniform."""
    import torch
    import transformers

    torch.manual_seed(0)
    heads = {"num_attention_heads": 16, "num_key_value_heads": KV_HEADS, "head_dim": 64}
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 4096}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=2 * LENGTH, initializer_range=0.05)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(2.0)
    model.save_pretrained(folder)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """The tokens of an engine, in its process."""
    import torch
    from vllm import SamplingParams

    llm = serving.engine(job, max_model_len=LENGTH + NEW, max_num_seqs=16)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    ms = 1000 * (time.perf_counter() - start) / (PROMPTS * NEW)
    tokens = [list(out.outputs[0].token_ids) for out in outs]
    return {"tokens": tokens, "ms": ms, "device": "cuda" if torch.cuda.is_available() else "cpu"}


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure(json.load(sys.stdin))))
    else:
        main()
