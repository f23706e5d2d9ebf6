"""`foveate doctor`: what this machine has, and what foveate would run on it."""

from __future__ import annotations

import json

import typer

from foveate.cli import AsJson
from foveate.cli.terminal import console


def doctor(as_json: AsJson = False) -> None:
    """Print the devices and versions of this machine, and what foveate would run on it."""
    import torch

    from foveate.integrations.transformers import releases
    from foveate.io import circumstances
    from foveate.lab.report import terminal
    from foveate.ops.attend import PromptHeads, dense_obstacles, prompt_path
    from foveate.ops.dispatch import kernel_status
    from foveate.planning.gpus import gpu_here
    from foveate.planning.machine import machine_facts

    on_gpu = torch.cuda.is_available()
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    first = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    kinds = [(kind, name) for kind in ("cpu", *(["cuda"] if on_gpu else [])) for name in dtypes]
    prompts = [f"{kind} {name}: {prompt_path(PromptHeads(torch.device(kind), dtypes[name]))}" for kind, name in kinds]
    libraries = "none but PyTorch: no GPU"
    if on_gpu:
        found = dense_obstacles(PromptHeads(first, torch.bfloat16, 128, 128, 4))
        libraries = ", ".join(f"{name}: {reason or 'used'}" for name, reason in found.items())
    facts = {
        "devices": [circumstances.device_name(device) for device in devices],
        "versions": circumstances.versions(),
        "commit": circumstances.commit(),
        "prompts": ", ".join(prompts),
        "dense libraries": libraries,
        **machine_facts(gpu_here()),
        "decode": "references (torch), gathering what they read",
        "kernels": kernel_status(),
        "transformers": f"tested with {releases.OLDEST} to {releases.NEWEST}",
        "models": "decoder-only, with attention through Transformers' AttentionInterface (docs/guide/models.md)",
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(terminal.facts(facts))
