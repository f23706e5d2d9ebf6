"""Learnable token eviction, written out query by query."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.calibration.retention_scores import RetentionScores
from foveate.hybrids.layers import LearnedEviction, rotate
from foveate.hybrids.layers.lte import STAYS, _open_rows, largest_far_share, lesson
from foveate.hybrids.state import Packing, RetainedMemory
from tests.hybrids.layers.mixers import WIDTH, eviction, hidden, run
from tests.retention import in_slots


def scored(layer: LearnedEviction, x: torch.Tensor) -> torch.Tensor:
    """Retention scores of all tokens, from keys before rotation."""
    return layer.scores(layer._heads(layer.k_proj(x)), layer._heads(layer.v_proj(x)))


def written_out(layer: LearnedEviction, x: torch.Tensor, at: torch.Tensor, cap: bool) -> torch.Tensor:
    """Equation 5 for one query and head after another; with a cap, the best so far of those that left the window."""
    q, k, v = (layer._heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    scores, angles = scored(layer, x), layer.rotary.angles(at)
    q, k = rotate(q, angles), rotate(k, angles)
    out = torch.zeros_like(q)
    for b in range(x.shape[0]):
        for head in range(layer.num_heads):
            group = head // (layer.num_heads // layer.num_kv_heads)
            margin = [1.0 if j < layer.sinks else float(scores[b, group, j]) for j in range(x.shape[1])]
            for i in range(x.shape[1]):
                seen = list(range(max(0, i - layer.window), i + 1))
                left = [j for j in range(max(0, i - layer.window)) if margin[j] > 0.5]
                if cap:
                    left = sorted(left, key=lambda j: (-margin[j], j))[: layer.buffer]
                index = torch.tensor(left + seen)
                weights = (k[b, group, index] @ q[b, head, i] * layer.scaling).softmax(0)
                out[b, head, i] = weights @ v[b, group, index]
    return layer.o_proj(out.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_what_a_query_sees():
    layer = eviction()
    x, at = hidden(90)
    margins = scored(layer, x)[:, :, : 90 - layer.window]
    assert ((margins > 0.5).sum(2) > layer.buffer).any()  # some head has to choose
    torch.testing.assert_close(run(layer, x, at), written_out(layer, x, at, cap=True), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_training_has_no_cap():
    layer = eviction(scores={"dropout": 0.0})
    x, at = hidden(90)
    layer.train()
    out, (scores, _) = layer(x, at)
    torch.testing.assert_close(out, written_out(layer, x, at, cap=False), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores, scored(layer, x))


@torch.no_grad()
def test_a_buffer_that_holds_all_is_what_training_sees():
    layer = eviction(buffer=100, scores={"dropout": 0.0})
    x, at = hidden(120)
    trained = layer.train()(x, at)[0]
    torch.testing.assert_close(run(layer.eval(), x, at), trained, atol=2e-6, rtol=1e-4)


def test_the_gradient_of_a_score_is_its_value_s_share():
    """Equation 6: the score's gradient is that of a factor of 1 on the value."""
    layer = eviction(scores={"dropout": 0.0}).train()
    x, at = hidden(60)
    out, (scores, _) = layer(x, at)
    scores.retain_grad()
    out.square().sum().backward()

    q, k, v = (layer._heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    factor = torch.ones(scores.shape, requires_grad=True)
    retained = scored(layer, x) > 0.5
    retained[:, :, : layer.sinks] = True
    age = at[0][:, None] - at[0]
    mask = (age >= 0) & ((age <= layer.window) | retained[:, :, None])
    angles = layer.rotary.angles(at)
    logits = rotate(q, angles) @ rotate(k, angles).repeat_interleave(2, 1).mT * layer.scaling
    weights = logits.masked_fill(~mask.repeat_interleave(2, 1), float("-inf")).softmax(-1)
    again = weights @ (v * factor[..., None]).repeat_interleave(2, 1)
    layer.o_proj(again.transpose(1, 2).flatten(2)).square().sum().backward()
    torch.testing.assert_close(scores.grad, factor.grad, atol=1e-5, rtol=1e-4)
    assert float(scores.grad.abs().max()) > 0


@torch.no_grad()
@pytest.mark.parametrize("length", [50, 120])
def test_scores_computed_in_pieces(length, monkeypatch):
    """Pieces of a prompt's tokens, and of the window's in decode, score as all at once."""
    layer, (x, at) = eviction(), hidden(length + 40)
    whole, pieces, sizes = RetainedMemory(layer.window, layer.buffer), RetainedMemory(layer.window, layer.buffer), []
    expected = [run(layer, x[:, :length], at[:, :length], whole)]
    expected += [run(layer, x[:, i : i + 1], at[:, i : i + 1], whole) for i in range(length, length + 40)]
    for name, size in (("SCORED", 22), ("PIECE", 11)):
        monkeypatch.setattr(f"foveate.hybrids.layers.lte.{name}", size)
    scored = layer.scores.of_cached

    def noted(k, v, angles, real, slots=None):
        sizes.append((slots is not None, angles[0].shape[1]))
        return scored(k, v, angles, real, slots)

    monkeypatch.setattr(layer.scores, "of_cached", noted)
    found = [run(layer, x[:, :length], at[:, :length], pieces)]
    found += [run(layer, x[:, i : i + 1], at[:, i : i + 1], pieces) for i in range(length, length + 40)]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), atol=2e-6, rtol=1e-4)
    assert max(tokens for _, tokens in sizes) == 11 + 2 * layer.reach
    assert {in_slots for in_slots, _ in sizes} == {False, True}, "of a prompt and in decode"


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 40])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_scores_of_cached_tokens_are_the_module_s(kind, length):
    torch.manual_seed(0)
    scores = RetentionScores(3, 64, kind=kind, dropout=0.4).double()  # in training, which drops nothing of a cache
    for conv in (*scores.convs, scores.head):
        torch.nn.init.normal_(conv.bias)
    k, v, given, tokens = in_slots(2, 3, length, (40, 24), torch.float64)
    found = scores.of_cached(k, v, **given)
    expected = scores.eval()(*tokens, given["real"])
    real = given["real"][:, None].expand_as(found)
    torch.testing.assert_close(found[real], expected[real], atol=1e-6, rtol=1e-6)
    assert found.std() > 0.05 or length == 1
    plain = scores.of_cached(*tokens, angles=None, real=given["real"])
    torch.testing.assert_close(plain, expected, atol=1e-6, rtol=1e-6)


def test_everything_is_retained_at_first():
    torch.manual_seed(1)
    scores = RetentionScores(4, 128).eval()(0.1 * torch.randn(2, 4, 50, 64), 0.1 * torch.randn(2, 4, 50, 64))
    assert (scores > 0.5).all()


@torch.no_grad()
def test_the_published_prompt_keeps_the_best_of_all():
    """The labelled option: one set for all queries, taken from the whole prompt; decoding goes on from it."""
    layer = eviction(whole_prompt=True)
    x, at = hidden(90)
    memory = RetainedMemory(layer.window, layer.buffer)
    out = run(layer, x, at, memory)
    q, k, v = (layer._heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    angles = layer.rotary.angles(at)
    q, k, scores = rotate(q, angles), rotate(k, angles), scored(layer, x)
    scores[:, :, : layer.sinks] = 1.0
    expected = torch.zeros_like(q)
    for b in range(2):
        for head in range(4):
            margin = scores[b, head // 2].tolist()
            left = [j for j in range(90 - layer.window) if margin[j] > 0.5]
            best = sorted(left, key=lambda j: (-margin[j], j))[: layer.buffer]
            assert sorted(best) == memory.tensors["positions"][b, head // 2, : len(best)].tolist()
            for i in range(90):
                index = [j for j in best if j < i - layer.window] + list(range(max(0, i - layer.window), i + 1))
                weights = (k[b, head // 2, index] @ q[b, head, i] * layer.scaling).softmax(0)
                expected[b, head, i] = weights @ v[b, head // 2, index]
    torch.testing.assert_close(out, layer.o_proj(expected.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-4)
    running, kept = eviction(), RetainedMemory(layer.window, layer.buffer)
    run(running, x, at, kept)
    assert sorted(kept.tensors["positions"][0, 0].tolist()) == sorted(memory.tensors["positions"][0, 0].tolist())
    more, _ = hidden(100, seed=5)
    later = torch.arange(90, 190)[None]
    for token in range(100):
        one = run(layer, more[:, token : token + 1], later[:, token : token + 1], memory)
        other = run(running, more[:, token : token + 1], later[:, token : token + 1], kept)
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


@torch.no_grad()
def test_scores_are_batched():
    """A decode step rarely scores: once in ``window`` less the scores' reach to both sides."""
    layer = eviction()
    calls = []
    layer.scores.register_forward_hook(lambda *_: calls.append(1))
    memory = RetainedMemory(layer.window, layer.buffer)
    x, at = hidden(200)
    for token in range(200):
        run(layer, x[:, token : token + 1], at[:, token : token + 1], memory)
    assert len(calls) <= 200 // (layer.window - 2 * layer.scores.reach) + 1


@torch.no_grad()
def test_scores_are_due_in_time_in_the_smallest_window():
    """Every step has to score then, since the next one writes over what a score needs."""
    layer = eviction(window=13, buffer=5)
    memory = RetainedMemory(layer.window, layer.buffer)
    x, at = hidden(80)
    steps = [run(layer, x[:, token : token + 1], at[:, token : token + 1], memory) for token in range(80)]
    torch.testing.assert_close(torch.cat(steps, 1), run(layer, x, at), atol=2e-6, rtol=1e-4)


class Operations(TorchDispatchMode):
    """The names of the operations that PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[60, 60], [60, 45]])
def test_a_step_can_be_replayed(lengths):
    """Between scores nothing waits for the device, comes from the host or moves in memory, whatever rows' lengths."""
    layer = eviction()
    memory = RetainedMemory(layer.window, layer.buffer)
    x, at = hidden(120)
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    run(layer, x[:, :60], at[:, :60], memory, None if bool(mask.all()) else Packing(mask))
    run(layer, x[:, 60:61], torch.tensor(lengths)[:, None], memory)
    addresses = {name: tensor.data_ptr() for name, tensor in memory.tensors.items()}
    replayed = 0
    for token in range(61, 120):
        due = layer._scores_due(memory)
        q, k, v = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2))
        with Operations() as asked:
            layer._step(q, k, v, memory)
        waits = {"_local_scalar_dense", "lift_fresh", "_to_copy", "nonzero"} & asked.names
        assert due or not waits, waits
        replayed += not due
        assert memory.lengths == [length + token - 59 for length in lengths]
        assert memory.tensors["numbers"][:, 0].tolist() == memory._on_device == memory.lengths
        assert memory.tensors["slots"].tolist() == [length % 31 for length in memory.lengths]
    assert replayed > 40
    assert {name: tensor.data_ptr() for name, tensor in memory.tensors.items()} == addresses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 12}, "window must be at least the 13"),
        ({"buffer": 2, "sinks": 3}, "buffer must be"),
        ({"scores": {"kind": "rnn"}}, "kind must be"),
        ({"scores": {"dropout_at": "both"}}, "dropout_at must be"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    settings = {"window": 30, "buffer": 12} | changes
    with pytest.raises(ValueError, match=message):
        LearnedEviction(WIDTH, 4, 2, 16, **settings)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads must be a multiple"):
        LearnedEviction(WIDTH, 4, 3, 16, window=30, buffer=12)


def test_the_gradient_of_scores_is_that_of_a_factor_of_the_values():
    """Equation 6."""
    layer = eviction(scores={"dropout": 0.0}).double().train()
    x, at = hidden(120)
    x = x.double()
    taken = []
    logits = layer.scores.logits
    layer.scores.logits = lambda *given: taken.append(logits(*given)) or taken[0].retain_grad() or taken[0]
    wanted = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out, (scores, taught) = layer(x, at)
    assert taught is None
    (out * wanted).sum().backward()
    q, k, v = (layer._heads(proj(x)).detach() for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    angles = layer.rotary.angles(at)
    q, k = rotate(q, angles), rotate(k, angles)
    kept = scores.detach() > 0.5
    kept[:, :, : layer.sinks] = True
    group = layer.num_heads // layer.num_kv_heads
    k, v, kept = (t.repeat_interleave(group, 1) for t in (k, v, kept))
    i, j = torch.arange(120)[:, None], torch.arange(120)
    seen = (j <= i) & ((i - j <= layer.window) | kept[:, :, None])
    factor = torch.ones(scores.shape, dtype=torch.float64, requires_grad=True)
    values = v * factor.repeat_interleave(group, 1)[..., None]
    expected = (q @ k.mT * layer.scaling).masked_fill(~seen, float("-inf")).softmax(-1) @ values
    expected = layer.o_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)
    (expected * wanted).sum().backward()
    slope = (scores * (1 - scores)).detach()
    torch.testing.assert_close(taken[0].grad.double() / slope, factor.grad, atol=1e-5, rtol=1e-4)


def test_what_a_token_is_worth_written_out():
    layer = eviction(gradient="worth")
    x, at = hidden(60)
    q, k = (rotate(layer._heads(proj(x)), layer.rotary.angles(at)) for proj in (layer.q_proj, layer.k_proj))
    found = largest_far_share(q, k, layer.scaling, layer.window)
    expected, group = torch.zeros(found.shape), layer.num_heads // layer.num_kv_heads
    for b in range(len(x)):
        for h in range(layer.num_heads):
            for i in range(60):
                shares = (q[b, h, i] @ k[b, h // group, : i + 1].T * layer.scaling).softmax(-1)
                for j in range(i - layer.window):
                    expected[b, h // group, j] = max(expected[b, h // group, j], shares[j])
    torch.testing.assert_close(found, expected)
    assert not found[:, :, 60 - layer.window - 1 :].any()
    assert found[:, :, : 60 - layer.window - 1].all()


def test_the_lesson_written_out_and_blind_to_the_level():
    logits, worth = torch.randn(3, 2, 50), torch.rand(3, 2, 50)
    found, expected = lesson(logits, worth, sinks=4, window=20), 0
    for b in range(3):
        for h in range(2):
            s, w = logits[b, h, 4:29], worth[b, h, 4:29]
            expected -= w.max() * (w**2 / (w**2).sum() * s.log_softmax(0)).sum() / 6
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lesson(logits + 3, worth, 4, 20), found)
    assert lesson(logits, torch.zeros(3, 2, 50), 4, 20) == 0  # nothing is looked for
    assert lesson(logits[..., :10], worth[..., :10], 4, 20).isfinite()  # no token has a query beyond its window


def test_scores_learn_by_the_lesson_what_is_looked_for_and_nothing_else_does():
    """Far queries look for tokens of one kind; after the lesson these have the highest scores."""
    layer = eviction(scores={"dropout": 0.0}, gradient="worth").train()
    layer.opened = torch.tensor([0.25, 0.3])
    wide = layer.head_dim
    with torch.no_grad():  # queries are alike, and keys of marked tokens meet them
        layer.q_proj.weight.zero_()
        layer.k_proj.weight.zero_()
        layer.q_proj.weight.view(-1, wide, WIDTH)[:, wide // 2 - 1, 0] = 1  # a dimension that hardly turns
        layer.k_proj.weight.view(-1, wide, WIDTH)[:, wide // 2 - 1, 1] = 12
    x, at = hidden(160, batch=8)
    marked = torch.rand(8, 160, generator=torch.Generator().manual_seed(3)) < 0.04
    x[..., 0], x[..., 1] = 4, marked.float()
    optimizer = torch.optim.AdamW(layer.scores.parameters(), lr=1e-2)
    for step in range(60):
        layer.opened[1] = 0.37 * step % 1  # another row each time
        taught = layer(x, at)[1].lesson
        optimizer.zero_grad()
        taught.backward()
        optimizer.step()
    assert all(p.grad is None for name, p in layer.named_parameters() if "scores" not in name)
    counted = slice(layer.sinks, 160 - layer.window - 1)
    scores, marked = layer(x, at)[1].scores[..., counted], marked[:, None, counted].expand(-1, 2, -1)
    assert scores[marked].mean() > scores[~marked].mean() + 0.3
    right = (scores[marked][:, None] > scores[~marked]).float().mean()
    assert right > 0.95


def test_a_cap_bounds_scores_in_training_and_leaves_their_order():
    free, capped = RetentionScores(2, 16, dropout=0.0), RetentionScores(2, 16, dropout=0.0, cap=4.0)
    capped.load_state_dict(free.state_dict())
    k, v = (50 * torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    scores, bounded = free(k, v), capped(k, v)
    logits = free.logits(k, v)
    torch.testing.assert_close(bounded, (4 * (logits / 4).tanh()).sigmoid())
    assert scores.min() < torch.tensor(-4.0).sigmoid() <= bounded.min()
    assert torch.equal(bounded > 0.5, scores > 0.5)
    with pytest.raises(ValueError, match="cap must be above 0 or None, not 0"):
        RetentionScores(2, 16, cap=0.0)
    with pytest.raises(ValueError, match="gradient must be value or worth, not 'sum'"):
        eviction(gradient="sum")


@pytest.mark.parametrize("gradient", ["value", "worth"])
def test_while_opened_all_is_retained_and_scores_move_nothing_but_themselves(gradient):
    """The same compiled layer serves before and after; keys and values learn what full attention teaches."""
    layer = eviction(scores={"dropout": 0.0}, gradient=gradient).train()
    layer.opened = torch.ones(2)
    x, at = hidden(90)
    wanted = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    out, (_, taught) = layer(x, at)
    ((out * wanted).sum() + (0 if taught is None else taught)).backward()
    moved = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    assert moved["scores.head.weight"].abs().max() > 0
    layer.zero_grad()
    q, k, v = (layer._heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (rotate(t, layer.rotary.angles(at)) for t in (q, k))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True)
    (layer.o_proj(whole.transpose(1, 2).flatten(2)) * wanted).sum().backward()
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(moved[f"{name}.weight"], layer.get_submodule(name).weight.grad, atol=1e-4, rtol=1e-4)
    layer.opened.fill_(0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, at)[0], written_out(layer, x, at, cap=False), atol=1e-5, rtol=1e-4)


def test_a_share_of_the_rows_is_open():
    layer = eviction(scores={"dropout": 0.0}).train()
    x, at = hidden(120, batch=8)
    found = {}
    with torch.no_grad():
        for share in (1.0, 0.25, 0.0):
            layer.opened = torch.tensor([share, 0.4])
            found[share] = layer(x, at)[0]
        same = [torch.equal(found[0.25][row], found[1.0][row]) for row in range(8)]
        assert sum(same) == 2
        assert [torch.equal(found[0.25][row], found[0.0][row]) for row in range(8)] == [not one for one in same]
        layer.opened = torch.tensor([0.25, 0.9])
        assert [torch.equal(layer(x, at)[0][row], found[1.0][row]) for row in range(8)] != same


def test_a_lesson_reaches_scores_that_the_cap_has_saturated():
    layer = eviction(scores={"dropout": 0.0, "cap": 4.0}, gradient="worth").train()
    with torch.no_grad():
        layer.scores.head.bias.fill_(100)
    _, (scores, taught) = layer(*hidden(120))
    taught.backward()
    assert (scores == torch.tensor(4.0).sigmoid()).all()
    assert layer.scores.head.weight.grad.abs().max() > 1e-3


def test_the_rows_that_teach_are_those_that_stay_open():
    layer = eviction(gradient="worth")
    for rows, phase in itertools.product((1, 8, 20, 64), (0.0, 0.35, 0.8)):
        layer.opened = torch.tensor([STAYS, phase])
        taught, opened = layer._taught_rows(rows), _open_rows(layer.opened, rows).flatten()
        assert len(taught) == max(1, rows // 8)
        assert opened.sum() == 0 or set(taught.tolist()) & set(opened.nonzero().flatten().tolist())
        if rows >= 8:
            assert opened[taught].float().mean() > 0.8
