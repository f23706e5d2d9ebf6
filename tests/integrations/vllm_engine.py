"""Runs vLLM once: a job of prompts as JSON on standard input, the answers as JSON on standard output's last line."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from types import SimpleNamespace

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

SECOND_RUNNER = "vllm.v1.worker.cpu.model_runner"
"""The module of model runner V2 on a CPU, which is imported where it is chosen."""


def ranks(number: int) -> dict[str, str]:
    """Variables for several ranks: a core each, which they share where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(cores[rank % len(cores)]) for rank in range(number))
    return {"VLLM_CPU_OMP_THREADS_BIND": bind}


def main() -> None:
    job = json.load(sys.stdin)
    if job["second"]:
        by_second_runner()
    from vllm import LLM, SamplingParams

    if job["replaying"]:
        replaying()
    how = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
    how |= {"skip_tokenizer_init": True, "disable_log_stats": False}
    if job["spec"] is not None:
        how |= {"attention_backend": "CUSTOM", "additional_config": {"foveate": job["spec"]}}
    llm = LLM(model=job["model"], **how | job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, detokenize=False)
    found = []
    for _ in range(job["times"]):
        outs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        found.append([list(out.outputs[0].token_ids) for out in outs])
    counts = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    found = {
        "tokens": found,
        "audits": audits(),
        "cached": [out.num_cached_tokens for out in outs],
        "counts": counts,
        "read": read(),
        "second": SECOND_RUNNER in sys.modules,
    }
    print(json.dumps(found))


def by_second_runner() -> None:
    """Choose model runner V2, whose kernels Triton interprets: it has no compiler for CPUs. Before vLLM is imported."""
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None)  # that it is there is all that vLLM asks


def replaying() -> None:
    """Decide what is dense as where vLLM replays decode steps in CUDA graphs, which a CPU never does."""
    from foveate.integrations.vllm.builder import StepBuilder

    prepare = StepBuilder.prepare

    def prepared(self, *given):
        prepare(self, *given)
        self.largest_graph = 4

    StepBuilder.prepare = prepared


def read() -> dict[str, float]:
    """What foveate has counted in this process, to the last step."""
    gc.unfreeze()  # vLLM has hidden what it made at the start
    steps = [one for one in gc.get_objects() if type(one).__name__ == "EngineSteps"]
    totals = [dataclasses.asdict(one.totals) | {"keys_read": float(one.keys_read())} for one in steps]
    return {name: sum(one[name] for one in totals) for name in totals[0]} if totals else {}


def audits() -> dict[str, list[float]]:
    """What was observed of audited rows: by histogram, the numbers in its buckets and their sum."""
    gc.unfreeze()
    files = [one for one in gc.get_objects() if type(one).__name__ == "Published"]
    return files[0].observed if files else {}


if __name__ == "__main__":
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    main()
