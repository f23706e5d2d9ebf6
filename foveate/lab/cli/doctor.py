"""`foveate doctor`: what this machine has, and what foveate would run on it."""

from __future__ import annotations

import json

import typer

from foveate.cli import AsJson
from foveate.cli.terminal import console


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, and what foveate would run on it."""
    import torch

    from foveate.integrations.transformers import releases
    from foveate.lab.report import terminal
    from foveate.lab.results import circumstances
    from foveate.ops.dispatch import kernel_status

    devices = [circumstances.device_name("cpu")]
    devices += [circumstances.device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    facts = {
        "devices": devices,
        "versions": circumstances.versions(),
        "commit": circumstances.commit(),
        "prompts": _prompt_paths(["cpu", *(["cuda"] if torch.cuda.is_available() else [])]),
        "dense libraries": _dense_libraries() if torch.cuda.is_available() else "none but PyTorch: no GPU",
        "decode": "references (torch), gathering what they read",
        "kernels": kernel_status(),
        "gated delta rule": _delta_rule(torch.cuda.is_available()),
        "transformers": f"tested with {releases.OLDEST} to {releases.NEWEST}",
        "models": "decoder-only, with attention through Transformers' AttentionInterface (docs/guide/models.md)",
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(terminal.facts(facts))


def _delta_rule(on_gpu: bool) -> str:
    """Which code runs the hybrids' recurrent layers."""
    import torch

    from foveate.ops.recur import rule_in_use

    return rule_in_use(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), 128, 128, torch.bfloat16)


def _prompt_paths(devices: list[str]) -> str:
    """Which code attends in prompts, by device and number format."""
    import torch

    from foveate.ops.attend import PromptHeads, prompt_path

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    heads = {(one, name): PromptHeads(torch.device(one), dtype) for one in devices for name, dtype in dtypes.items()}
    return ", ".join(f"{device} {name}: {prompt_path(one)}" for (device, name), one in heads.items())


def _dense_libraries() -> str:
    """Which libraries attend densely to prompts on the first GPU, and why others do not."""
    import torch

    from foveate.ops.attend import PromptHeads, dense_obstacles

    heads = PromptHeads(torch.device("cuda", 0), torch.bfloat16, 128, 128, 4)
    return ", ".join(f"{name}: {reason or 'used'}" for name, reason in dense_obstacles(heads).items())
