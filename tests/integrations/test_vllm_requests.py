"""What single requests ask of an engine: dense reading here, and vLLM's own features with a method at full budget."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from foveate.integrations.vllm import requests
from tests.integrations.test_in_vllm import BY_PAGES, CHUNKS, NEW, PROMPTS, SMALL, attached, folder, run  # noqa: F401

DENSE = {"extra_args": {"foveate": "dense"}}
ASKED = [n in (0, 3, 4) for n in range(len(PROMPTS))]
"""Requests that ask for dense reading, among them ones that begin like others."""


@pytest.mark.parametrize(("spec", "second"), [(SMALL, False), (BY_PAGES, False), (BY_PAGES, True)])
def test_a_request_may_ask_for_dense_reading_beside_others(folder, spec, second):  # noqa: F811
    """Its tokens are those of dense attention, and its neighbours' are those of the method; the second time, too."""
    job = {"sampling": [DENSE if asked else {} for asked in ASKED]}
    job["refused"] = [{"extra_args": {"foveate": given}} for given in ("sparse", None, 1)]
    found = run(folder, spec, times=2, second=second, job=job, **CHUNKS)
    dense, sparse = attached(folder, None, PROMPTS), attached(folder, spec, PROMPTS)
    assert all(a != b for a, b in zip(dense, sparse)), "the budget must be small enough to be seen"
    assert found["tokens"] == [[a if asked else b for asked, a, b in zip(ASKED, dense, sparse)]] * 2
    assert found["read"]["dense_rows"] == 2 * sum(ASKED) * (NEW - 1)
    assert [text.rpartition("must be ")[2] for text in found["refused"]] == [
        f'"dense", not {given!r}' for given in ("sparse", None, 1)
    ]


class Runner:
    """What model runner V2 does with requests."""

    def __init__(self):
        self.told = []

    def add_requests(self, output):
        return "added"

    def prepare_attn(self, batch):
        self.told.append(requests.dense_rows())
        return "prepared"

    def prepare_dummy_attn(self, batch, valid=False):
        self.told.append(requests.dense_rows())


@pytest.fixture
def runner(monkeypatch):
    from vllm.v1.worker.gpu import model_runner

    monkeypatch.setattr(requests, "_rows", None)
    own = type("Own", (Runner,), dict(vars(Runner)))
    monkeypatch.setattr(model_runner, "GPUModelRunner", own)
    requests.install(second=True)
    requests.install(second=True)  # as for another group of layers
    return own()


def scheduled(new=None, finished=()):
    new = [
        SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra))
        for name, extra in (new or {}).items()
    ]
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(finished))


def test_rows_follow_their_requests_until_these_end(runner):
    def step(rows, **output):
        assert runner.add_requests(scheduled(**output)) == "added"
        assert runner.prepare_attn(SimpleNamespace(req_ids=rows)) == "prepared"
        return runner.told[-1]

    dense = DENSE["extra_args"]
    assert step(["a", "b"], new={"a": None, "b": {"other": 1}}) is None
    assert step(["b", "c", "a"], new={"c": dense}) == [False, True, False]
    assert step(["c", "a"]) == [True, False]
    runner.prepare_dummy_attn(SimpleNamespace(req_ids=["c"]), valid=True)
    assert runner.told[-1] is None, "a batch without requests"
    assert step(["a"]) is None, "c waits"
    assert step(["c", "d", "a"], new={"d": dense}) == [True, True, False]
    assert step(["c", "d"], finished=["c"], new={"c": None}) == [False, True], "a new request of the same name"
    assert step(["d"], new={"d": {}}) is None, "a request that is streamed goes on without it"
    assert runner.foveate_dense == set()


@pytest.mark.parametrize(
    ("extra", "ubatching", "why"),
    [
        ({"foveate": "sparse"}, False, r"""extra_args\["foveate"\] \(vllm_xargs\) must be "dense", not 'sparse'"""),
        ({"foveate": "dense"}, True, "is not supported with microbatches"),
        ({"foveate": "dense"}, False, None),
        ({"other": 1}, True, None),
        (None, True, None),
    ],
)
def test_what_a_request_may_not_ask_is_named(extra, ubatching, why):
    given = SimpleNamespace(extra_args=extra), SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=ubatching))
    if why is None:
        requests.check_request(*given)
    else:
        with pytest.raises(ValueError, match=why):
            requests.check_request(*given)
