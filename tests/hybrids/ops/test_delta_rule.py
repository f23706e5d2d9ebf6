"""The gated delta rule: its reference, its chunks, and Transformers' own."""

import sys
import types
import warnings

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from foveate.hybrids.ops.recur import chunked, gated_delta_rule, library, reference, rule_in_use


def problem(length: int = 130, dim: int = 16, value_dim: int = 24, dtype: torch.dtype = torch.float32, batch: int = 2):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    q, k, v = normal(batch, 3, length, dim), normal(batch, 3, length, dim), normal(batch, 3, length, value_dim)
    log_decay = -torch.nn.functional.softplus(normal(batch, 3, length))
    return [q, k, v, log_decay, normal(batch, 3, length).sigmoid()], normal(batch, 3, dim, value_dim).float()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("given", [True, False])
def test_chunks_are_the_reference(length, given):
    inputs, state = problem(length)
    state = state if given else None
    expected = reference.gated_delta_rule(*inputs, state=state)
    for rule in (chunked.gated_delta_rule, gated_delta_rule):
        found = rule(*inputs, state=state)
        torch.testing.assert_close(found.out, expected.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(found.state, expected.state, atol=2e-6, rtol=1e-5)


def test_transformers_rule_is_the_same():
    inputs, state = problem()
    out, last = torch_chunk_gated_delta_rule(
        *(x.transpose(1, 2) for x in inputs),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found = gated_delta_rule(*inputs, state=state)
    torch.testing.assert_close(found.out, out.transpose(1, 2), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.state, last, atol=1e-6, rtol=1e-5)


def test_the_equation():
    """Equation 4, written out with matrices for one head."""
    (q, k, v, log_decay, beta), _ = problem(length=5, batch=1)
    state = torch.zeros(24, 16)  # [Dv, D], as the paper has it
    unit = torch.eye(16)
    for t in range(5):
        key = torch.nn.functional.normalize(k[0, 1, t], dim=0)
        query = torch.nn.functional.normalize(q[0, 1, t], dim=0)
        decay, share = log_decay[0, 1, t].exp(), beta[0, 1, t]
        state = state @ (decay * (unit - share * torch.outer(key, key))) + share * torch.outer(v[0, 1, t], key)
        out = gated_delta_rule(q, k, v, log_decay, beta).out[0, 1, t]
        torch.testing.assert_close(out, state @ query / 4, atol=1e-5, rtol=1e-4)


def test_a_sequence_in_pieces_is_one_sequence():
    inputs, state = problem()
    whole = gated_delta_rule(*inputs, state=state)
    outs = []
    for first, last in ((0, 70), (70, 71), (71, 130)):
        out, state = gated_delta_rule(*(x[:, :, first:last] for x in inputs), state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state, whole.state, atol=2e-6, rtol=1e-5)


def test_gradients_are_the_reference_s():
    inputs, state = problem(length=70)
    found = []
    for rule in (reference.gated_delta_rule, chunked.gated_delta_rule):
        leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
        out, last = rule(*leaves[:5], state=leaves[5])
        found.append(torch.autograd.grad((out * inputs[2]).sum() + last.square().sum(), leaves))
    for one, other in zip(*found):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


def test_strong_decay_does_not_overflow():
    (q, k, v, log_decay, beta), _ = problem()
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay * 200, beta)]
    out, state = chunked.gated_delta_rule(*leaves)
    gradients = torch.autograd.grad(out.sum() + state.sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in (out, state, *gradients))


def test_half_precision_keeps_its_dtype_and_an_fp32_state():
    inputs, _ = problem()
    half = [x.bfloat16() for x in inputs[:3]] + inputs[3:]
    out, state = gated_delta_rule(*half)
    exact = gated_delta_rule(*(x.float() for x in half))
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(out.float(), exact.out, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("which", "shape", "message"),
    [
        (0, (2, 3, 9, 16), "q must be"),
        (2, (2, 3, 9, 24), "v must be"),
        (3, (2, 3, 9), "log_decay must be"),
        (4, (2, 3, 9), "beta must be"),
    ],
)
def test_shapes_that_do_not_fit(which, shape, message):
    inputs, _ = problem(length=8)
    inputs[which] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*inputs)


def test_a_state_that_does_not_fit():
    inputs, state = problem(length=8)
    with pytest.raises(ValueError, match="state must be"):
        gated_delta_rule(*inputs, state=state.mT)


def test_the_path_is_named():
    assert rule_in_use(torch.device("cpu"), 8, 64, 64, torch.bfloat16) == "torch (they run on GPUs)"


def test_autocast_does_not_reach_the_state():
    inputs, state = problem()
    expected = chunked.gated_delta_rule(*inputs, state=state)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked.gated_delta_rule(*inputs, state=state)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.state, expected.state)


def test_a_decay_that_is_a_growth_is_refused():
    (q, k, v, log_decay, beta), state = problem(64)
    log_decay[1, 2, 5] = 0.25
    for rule in (reference.gated_delta_rule, gated_delta_rule):
        with pytest.raises(ValueError, match=r"log_decay must be at most 0, not 0\.25"):
            rule(q, k, v, log_decay, beta, state=state)
    log_decay[1, 2, 5] = 0.0
    gated_delta_rule(q, k, v, log_decay, beta, state=state)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, back):
        return 1.5 * back


class TestProof:
    """What the library's rule must keep to, with rules of torch in its place."""

    @pytest.fixture
    def proved(self, monkeypatch):
        guard = types.SimpleNamespace(TRITON_ABOVE_3_7_1=False)
        monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", guard)

        def proved(change, gradients):
            calls = []

            def rule(*inputs, state=None):
                calls.append((inputs[0].shape[1], inputs[0].requires_grad))
                found = chunked.gated_delta_rule(*inputs, state=state)
                return reference.Recurred(change(found.out), found.state)

            monkeypatch.setattr(library, "gated_delta_rule", rule)
            library._proved.cache_clear()
            reason = library._proved(torch.device("cpu"), 3, 16, 24, torch.float16, gradients)
            library._proved.cache_clear()
            assert {heads for heads, _ in calls} == {3}, "kernels are tried for each number of heads"
            assert any(wanted for _, wanted in calls) == gradients
            return reason, guard.TRITON_ABOVE_3_7_1

        return proved

    def test_a_right_rule_is_used(self, proved):
        assert proved(lambda out: out, True) == ("", True)

    def test_without_gradients_they_are_not_asked_for(self, proved):
        assert proved(WrongGradient.apply, False) == ("", False)

    @pytest.mark.parametrize("gradients", [True, False])
    def test_a_wrong_output_is_seen(self, proved, gradients):
        reason, guard = proved(lambda out: 1.02 * out, gradients)
        assert "differs from fp32 by 0.02" in reason
        assert not guard

    def test_a_wrong_gradient_is_seen(self, proved):
        reason, guard = proved(WrongGradient.apply, True)
        assert "differs from fp32" in reason
        assert not guard


def test_on_a_gpu_without_the_library_the_slower_path_is_told_once(monkeypatch):
    monkeypatch.setattr(library, "kernels_wanted", lambda: True)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    library._say_once.cache_clear()
    q = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 8, 16))
    with pytest.warns(UserWarning, match="the slower torch path runs: fla-core is not installed"):
        assert library.obstacle(q, q) == "fla-core is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.obstacle(q, q)
    library._say_once.cache_clear()
