"""Every mixer: one piece, pieces, single tokens, undone tokens, padding and reordered rows all give the same."""

import pytest
import torch

from foveate.hybrids.state import Packing
from tests.hybrids.layers.mixers import MIXERS, WIDTH, hidden, run

every_mixer = pytest.mark.parametrize("name", MIXERS)
LENGTH = 140


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@every_mixer
@pytest.mark.parametrize(
    "pieces", [[LENGTH], [70, 70], [1] * LENGTH, [100] + [1] * 40, [3, 40, 1, 1, 1, 60] + [1] * 34], ids=str
)
def test_pieces_are_one_sequence(name, pieces):
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole, outs, first = run(mixer, x, at), [], 0
    for count in pieces:
        outs.append(run(mixer, x[:, first : first + count], at[:, first : first + count], kept))
        first += count
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=2e-6, rtol=1e-4)
    assert kept.lengths == [LENGTH, LENGTH]


@pytest.mark.parametrize("name", ["swa", "lte", "lte_mlp", "lte_mha"])
@pytest.mark.parametrize("size", [7, 64, 1000])
def test_a_prompt_is_read_in_pieces_of_any_size(name, size, monkeypatch):
    """Small ones on a CPU, and whole prompts where kernels run; single tokens go on from either."""
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole = run(mixer, x, at)
    monkeypatch.setattr("foveate.hybrids.layers.window.PIECE", size)
    outs = [run(mixer, x[:, :120], at[:, :120], kept)]
    outs += [run(mixer, x[:, token : token + 1], at[:, token : token + 1], kept) for token in range(120, LENGTH)]
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=2e-6, rtol=1e-4)


@every_mixer
def test_undone_tokens_leave_no_trace(name):
    """Rounds of drafts of which the last ones are refused, as assisted decoding has them."""
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole = run(mixer, x, at)
    kept.record_past = True
    outs = [run(mixer, x[:, :80], at[:, :80], kept)]
    kept.crop(0)
    draw = torch.Generator().manual_seed(1)
    first = 80
    while first < LENGTH:
        drafted = min(int(torch.randint(1, 9, (), generator=draw)), LENGTH - first)
        refused = int(torch.randint(0, drafted + 1, (), generator=draw)) if drafted > 1 else 0
        taken = drafted - refused
        draft = x[:, first : first + drafted].clone()
        draft[:, taken:] = torch.randn(2, refused, WIDTH, generator=draw)
        outs.append(run(mixer, draft, at[:, first : first + drafted], kept)[:, :taken])
        kept.crop(refused)
        first += taken
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=2e-6, rtol=1e-4)


@every_mixer
def test_several_steps_before_they_are_undone(name):
    """An assistant drafts token by token, and all drafts are refused at once."""
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole = run(mixer, x, at)
    kept.record_past = True
    run(mixer, x[:, :100], at[:, :100], kept)
    kept.crop(0)
    for token in range(100, 105):
        run(mixer, torch.randn(2, 1, WIDTH), at[:, token : token + 1], kept)
    kept.crop(5)
    rest = run(mixer, x[:, 100:], at[:, 100:], kept)
    torch.testing.assert_close(rest, whole[:, 100:], atol=2e-6, rtol=1e-4)


@every_mixer
def test_more_than_is_kept_cannot_be_undone(name):
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    run(mixer, x, at, kept)
    with pytest.raises(ValueError, match="cannot be undone"):
        kept.crop(LENGTH + 1)


@every_mixer
def test_padding_changes_nothing(name):
    """A row with padding before, and on later turns between, its tokens is what it is alone."""
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    columns = LENGTH + 20
    long, at = hidden(columns, batch=1, seed=1)
    short, _ = hidden(LENGTH, batch=1)
    mask = torch.ones(2, columns, dtype=torch.bool)
    mask[1, :15] = mask[1, 80:85] = False
    x = torch.full((2, columns, WIDTH), 7.0)
    x[0], x[1, mask[1]] = long[0], short[0]
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    outs = []
    for first, last in ((0, 60), (60, 79), (79, 80), (80, 120), (120, 121), (121, columns)):
        packing = Packing.of(mask[:, :last], last - first)
        some, where = x[:, first:last], positions[:, first:last]
        if packing is None:
            outs.append(run(mixer, some, where, kept))
        else:
            outs.append(packing.unpack(run(mixer, packing.pack(some), packing.pack(where), kept, packing)))
    out = torch.cat(outs, 1)
    torch.testing.assert_close(out[:1], run(mixer, long, at), atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(out[1:, mask[1]], run(mixer, short, at[:, :LENGTH]), atol=2e-6, rtol=1e-4)
    assert (out[1, ~mask[1]] == 0).all()


@every_mixer
def test_rows_can_be_reordered_and_repeated(name):
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole = run(mixer, x, at)
    run(mixer, x[:, :100], at[:, :100], kept)
    rows = torch.tensor([1, 0, 1])
    kept.take_rows(rows)
    rest = run(mixer, x[rows, 100:], at[:, 100:], kept)
    torch.testing.assert_close(rest, whole[rows, 100:], atol=2e-6, rtol=1e-4)


@every_mixer
def test_a_later_token_changes_no_earlier_output(name):
    """Beyond the reach of the scores, which the window hides, nothing looks ahead."""
    make, _ = MIXERS[name]
    mixer = make()
    x, at = hidden(LENGTH)
    other = x.clone()
    other[:, 90:] += 1
    torch.testing.assert_close(run(mixer, other, at)[:, :90], run(mixer, x, at)[:, :90], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["gdn", "swa", "lte"])
def test_the_memory_is_constant(name):
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    sizes = set()
    for start in range(0, 1000, 100):
        x, at = hidden(100, seed=start)
        run(mixer, x, at + start, kept)
        sizes.add(kept.nbytes)
    assert len(sizes) == 1


@every_mixer
def test_bf16_stays_near_fp32(name):
    make, memory = MIXERS[name]
    x, at = hidden(LENGTH)
    mixers = make(), make()
    for mixer in mixers:
        if name.startswith("lte"):
            mixer.scores.head.weight *= 20  # few tokens so near the threshold that rounding decides
    exact, half, kept = run(mixers[0], x, at), mixers[1].bfloat16(), memory()
    out = torch.cat(
        [run(half, x[:, :60].bfloat16(), at[:, :60], kept), run(half, x[:, 60:].bfloat16(), at[:, 60:], kept)], 1
    )
    assert out.dtype == torch.bfloat16
    error = (out.float() - exact).abs()
    assert float(error.median()) < 0.02 * float(exact.abs().max())


@every_mixer
def test_gradients_outside_of_training(name):
    """A mixer in eval mode goes backward, and its output is that without gradients."""
    make, _ = MIXERS[name]
    mixer = make()
    x, at = hidden(LENGTH)
    expected = run(mixer, x, at)
    with torch.enable_grad():
        x.requires_grad_()
        out = run(mixer, x, at)
        torch.testing.assert_close(out.detach(), expected, atol=2e-6, rtol=1e-4)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert gradient.isfinite().all()
    assert (gradient[:, :-1].abs().sum(-1) > 0).all()


@every_mixer
def test_inference_mode_and_no_grad_can_follow_each_other(name):
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole, outs = run(mixer, x, at), []
    for first, last in ((0, 60), (60, 61), (61, 62), (62, 100), (100, 101), (101, LENGTH)):
        with torch.inference_mode(first % 2 == 0):
            outs.append(run(mixer, x[:, first:last], at[:, first:last], kept).clone())
            kept.take_rows(torch.arange(2))
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=2e-6, rtol=1e-4)


@pytest.mark.full
@every_mixer
def test_recording_stays_small_without_crops(name):
    """An assistant that is never cropped: old tokens become final, and the last ones can still be undone."""
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(300)
    whole = run(mixer, x, at)
    kept.record_past = True
    outs = [run(mixer, x[:, :20], at[:, :20], kept)]
    for token in range(20, 290):
        outs.append(run(mixer, x[:, token : token + 1], at[:, token : token + 1], kept))
    assert getattr(kept, "_count", 0) <= 129
    run(mixer, torch.randn(2, 10, WIDTH), at[:, 290:], kept)
    kept.crop(10)
    outs.append(run(mixer, x[:, 290:], at[:, 290:], kept))
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=2e-6, rtol=1e-4)


@every_mixer
def test_a_piece_of_padding_alone(name):
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole, outs = run(mixer, x, at), []
    mask = torch.ones(2, LENGTH + 8, dtype=torch.bool)
    mask[:, 40:48] = False
    columns = torch.full((2, LENGTH + 8, WIDTH), 7.0)
    columns[:, mask[0]] = x
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    for first, last in ((0, 40), (40, 48), (48, LENGTH + 8)):
        packing = Packing.of(mask[:, :last], last - first)
        some, where = columns[:, first:last], positions[:, first:last]
        if packing is None:
            outs.append(run(mixer, some, where, kept))
        else:
            outs.append(packing.unpack(run(mixer, packing.pack(some), packing.pack(where), kept, packing)))
    torch.testing.assert_close(torch.cat(outs, 1)[:, mask[0]], whole, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["swa", "lte"])
def test_positions_that_begin_elsewhere(name):
    """Only distances count, for attention and for scores."""
    make, memory = MIXERS[name]
    mixer, kept = make(), memory()
    x, at = hidden(LENGTH)
    whole = run(mixer, x, at)
    outs = [run(mixer, x[:, :70], at[:, :70] + 33, kept)]
    outs += [run(mixer, x[:, token : token + 1], at[:, token : token + 1] + 33, kept) for token in range(70, LENGTH)]
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-4)
