"""Runs vLLM once: a job of prompts as JSON on standard input, the answers as JSON on standard output's last line."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

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
    from vllm.exceptions import VLLMValidationError

    if job["replaying"]:
        replaying()
    lost = recorded() if job.get("sleep") else None
    how = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
    how |= {"skip_tokenizer_init": True, "disable_log_stats": False}
    if job["spec"] is not None:
        how |= {"attention_backend": "CUSTOM", "additional_config": {"foveate": job["spec"]}}
    llm = LLM(model=job["model"], **how | job["engine"])
    plain = {"temperature": 0, "max_tokens": job["new"], "ignore_eos": True, "detokenize": False}
    own = job.get("sampling") or [{}] * len(job["prompts"])
    sampling = [SamplingParams(**plain | structured(more)) for more in own]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    refused = []
    for more in job.get("refused", ()):
        try:
            llm.generate(prompts[0], SamplingParams(**plain | more), use_tqdm=False)
        except VLLMValidationError as error:
            refused.append(str(error))
    found = []
    for time in range(job["times"]):
        if time and lost is not None:
            sleep_and_wake(llm, lost)
        outs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters(job))
        found.append([list(out.outputs[0].token_ids) for out in outs])
    answers = [answer(out) for out in outs]
    if job.get("cancelled"):
        answers.append(without(llm.llm_engine, prompts, sampling, job["cancelled"]))
    counts = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    found = {
        "tokens": found,
        "refused": refused,
        "answers": answers,
        "audits": audits(),
        "cached": [out.num_cached_tokens for out in outs],
        "counts": counts,
        "read": read(),
        "second": SECOND_RUNNER in sys.modules,
    }
    print(json.dumps(found))


def structured(sampling: dict) -> dict:
    """Sampling parameters of a job, in which ``json_schema`` stands for structured output."""
    from vllm.sampling_params import StructuredOutputsParams

    schema, more = sampling.get("json_schema"), {name: x for name, x in sampling.items() if name != "json_schema"}
    return more if schema is None else more | {"structured_outputs": StructuredOutputsParams(json=schema)}


def adapters(job: dict) -> list | None:
    """The adapter of each prompt of a job, by its folder; None: of none."""
    from vllm.lora.request import LoRARequest

    given = job.get("adapters")
    return given and [None if path is None else LoRARequest("tiny", 1, path) for path in given]


def answer(out: Any) -> dict:
    """All that a request's answer holds."""
    pieces = [(list(one.token_ids), numbers(one.logprobs)) for one in out.outputs]
    return {"pieces": pieces, "prompt": numbers(out.prompt_logprobs)}


def numbers(logprobs: Any) -> list[dict] | None:
    """Log-probabilities of tokens, by position."""
    return logprobs and [at and {str(token): one.logprob for token, one in at.items()} for at in logprobs]


def without(engine: Any, prompts: list, sampling: list, cancelled: list[int]) -> list[list[int]]:
    """The tokens of the other requests when some are cancelled after a few steps."""
    for n, given in enumerate(zip(prompts, sampling)):
        engine.add_request(str(n), *given)
    found, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        for out in engine.step():
            found[int(out.request_id)] = list(out.outputs[0].token_ids)
        if steps == 8:
            engine.abort_request([str(n) for n in cancelled])
    assert all(len(found[n]) < sampling[n].max_tokens for n in cancelled if n in found)
    return [found[n] for n in range(len(prompts)) if n not in cancelled]


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


def recorded() -> list:
    """What builders will have allocated when an engine is up, with its caches, and the layers of these."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from foveate.integrations.vllm import builder

    found, prepare = [], builder.StepBuilder.prepare

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            found.extend([out] if hasattr(out, "fill_") and not out.is_meta else [])
            return out

    def prepared(self, *given):
        found.clear()  # of the last engine; those before it only measured memory
        with Recording():
            prepare(self, *given)
        found.extend(self.layers)

    builder.StepBuilder.prepare = prepared
    return found


def sleep_and_wake(llm: Any, lost: list) -> None:
    """Drop what was allocated with the caches. A CPU does as vLLM's sleep, which it has not."""
    import torch

    if torch.cuda.is_available():
        llm.sleep(level=1)
        llm.wake_up()
    else:
        llm.reset_prefix_cache()
    layers = [one for one in lost if not isinstance(one, torch.Tensor)]
    with torch.inference_mode():
        for layer in layers:
            layer.kv_cache.fill_(1e4)
        for one in lost[: -len(layers)]:
            if one.device == layers[0].kv_cache.device:
                one.fill_(torch.nan if one.is_floating_point() else torch.iinfo(one.dtype).max)


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
