"""Servers by `foveate serve` on a CPU: many clients, what a request may ask by the OpenAI API, and metrics."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("openai")

import openai

from tests.integrations.test_in_vllm import FULL, NEW, SMALL, attached, drawn, folder  # noqa: F401
from tests.integrations.test_vllm_requests import SCHEMA, with_bytes  # noqa: F401
from tests.integrations.vllm_engine import ENVIRONMENT

OWN = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
"""The command of vLLM itself."""
OURS = ["-m", "foveate", "serve"]


@contextlib.contextmanager
def serving(command, log, *flags, **options):
    """A client of a server by a command of this Python's, and the server's address. Its output goes to a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"dtype": "float32", "max-model-len": 512, "max-num-seqs": 8, "block-size": 16} | options
    options |= {"port": port, "host": "127.0.0.1", "served-model-name": "tiny"}
    command = [sys.executable, *command, "--enforce-eager", *flags]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300, max_retries=0), address
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):  # noqa: F811
    """With the small budget."""
    path = tmp_path_factory.mktemp("server")
    config, log = path / "foveate.json", path / "log.txt"
    config.write_text(json.dumps({"method": SMALL}), encoding="utf-8")
    how = {"method": str(config), "max-num-batched-tokens": 128}
    with serving([*OURS, str(folder)], log, **how) as found:
        said = log.read_text(encoding="utf-8")
        assert "dense, choosing: 0; reading: 1, 2, 4, 5; choosing: 3" in said
        assert "foveate: 6 layers decode by kascade_paper:" in said
        yield found


def metrics_of(address):
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [re.fullmatch(r"([\w:]+)(\{.*\})? (\S+)", line) for line in lines if not line.startswith("#")]
    labels = {one[1]: one[2] for one in found if one}
    its = {name for name in labels if name.startswith("foveate:") and name.endswith("_total")}
    assert {labels[name] for name in its} <= {labels["vllm:generation_tokens_total"]}
    return {one[1]: float(one[3]) for one in found if one}


def ask(client, prompt, count=None, **body):
    """The tokens of an answer; with ``count`` the client leaves after so many pieces."""
    how = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "stream": True}
    body = {"ignore_eos": True, "skip_special_tokens": False} | body
    text, pieces = "", client.completions.create(**how, extra_body=body)
    for number, piece in enumerate(pieces):
        text += piece.choices[0].text
        if number == count:
            pieces.close()
            break
    return [int(word[1:]) for word in text.split()]


def test_a_server_streams_to_many_and_drops_those_who_leave(folder, server):  # noqa: F811
    """Half of 32 requests at a time are cancelled after some tokens: the others get theirs, and no memory is kept."""
    client, address = server
    prompts = [drawn(20 + 9 * (n % 8), 100 + n) for n in range(32)]
    expected = attached(folder, SMALL, prompts)
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            found = list(pool.map(lambda n: ask(client, prompts[n], 3 + n % 5 if n % 2 else None), range(32)))
        for n, (mine, its) in enumerate(zip(found, expected)):
            assert mine == (its[: len(mine)] if n % 2 else its)
            assert 0 < len(mine) < NEW or n % 2 == 0
    for _ in range(60):
        counts = metrics_of(address)
        if counts["vllm:num_requests_running"] == 0:
            break
        time.sleep(0.5)
    assert counts["vllm:num_requests_running"] == counts["vllm:num_requests_waiting"] == 0
    assert counts["vllm:kv_cache_usage_perc"] == 0
    assert counts["foveate:decode_tokens_total"] > 16 * NEW
    assert 0 < counts["foveate:keys_read_total"] < counts["foveate:keys_available_total"]
    assert counts["foveate:selections_total"] == 2 * counts["foveate:decode_tokens_total"]
    assert ask(client, prompts[0]) == expected[0]


def test_a_client_may_ask_for_dense_reading_and_is_told_what_else_it_may_not(folder, server):  # noqa: F811
    """A mistake is the client's: the server goes on."""
    client, _ = server
    prompt, wrong = drawn(150, 5), {"vllm_xargs": {"foveate": "sparse"}}
    dense, sparse = (attached(folder, spec, [prompt])[0] for spec in (None, SMALL))
    assert dense != sparse
    assert ask(client, prompt, vllm_xargs={"foveate": "dense"}) == dense
    for stream, error in ((True, openai.APIError), (False, openai.BadRequestError)):
        with pytest.raises(error, match=r"must be .dense., not .*sparse"):
            list(client.completions.create(model="tiny", prompt=prompt, stream=stream, extra_body=wrong))
    assert ask(client, prompt) == sparse


def test_a_tool_call_is_that_of_vllm_itself(with_bytes, tmp_path):  # noqa: F811
    tool = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}
    how = {"model": "tiny", "messages": [{"role": "user", "content": "Paint it. " * 12}], "tools": [tool]}
    how |= {"tool_choice": {"type": "function", "function": {"name": "paint"}}, "temperature": 0, "max_tokens": 200}
    structured = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    options = {"tool-call-parser": "hermes", "structured-outputs-config": structured, "block-size": 32}
    calls = []
    for command, more in ((OWN, {}), (OURS, {"method": FULL})):
        given = [*command, str(with_bytes[0])], tmp_path / "log.txt", "--enable-auto-tool-choice"
        with serving(*given, **options | more) as (client, address):
            calls.append(client.chat.completions.create(**how).choices[0].message.tool_calls[0].function)
            counts = metrics_of(address)
    assert calls[0] == calls[1]
    assert calls[1].name == "paint"
    assert set(json.loads(calls[1].arguments)) == {"code", "good"}
    assert counts["foveate:decode_tokens_total"] > 0
