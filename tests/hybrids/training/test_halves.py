from foveate.hybrids.training.halves import halves
from tests import tiny


def test_halves_leave_special_tokens_out(tokenizer):
    keys, values = halves(tokenizer)
    assert not set(keys) & set(values)
    assert abs(len(keys) - len(values)) <= 1
    assert sorted([*keys, *values]) == sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids) - {2})
    assert (keys, values) == halves(tiny.make_tokenizer(None))
