import pytest
import torch
from matplotlib.image import imread

from benchmarks import attention_map as maps
from foveate.integrations.transformers.loading import load_model
from tests import tiny

TEXT = "Tides rise\nand fall.\n\nBread is baked.\n\n\n\nThe sea rose again.\n\nWhat now?\n"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, "float32", "cpu")


def test_segments_are_the_paragraphs(tokenizer):
    text = maps.segments(tokenizer, TEXT, maps.TOPICS)
    pieces = [tokenizer.decode([t for t, s in zip(text.ids, text.of) if s == i]).strip() for i in range(4)]
    assert pieces == ["Tides rise and fall.", "Bread is baked.", "The sea rose again.", "What now?"]
    edges = text.edges()
    assert edges[0] == 0
    assert edges[-1] == len(text.ids)
    assert text.of.tolist() == sorted(text.of.tolist())


def test_pairs_of_segments():
    text = maps.Segments((), torch.zeros(0, dtype=torch.int64), ("a", "b", "c", "a", "b", "d"))
    assert text.pairs(same=True) == [(3, 0), (4, 1)]
    assert text.pairs(same=False) == [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (4, 0), (4, 2), (4, 3)]


def test_reach_wants_the_topic_and_not_a_token_that_all_look_at(tokenizer):
    text = maps.segments(tokenizer, TEXT, maps.TOPICS)
    shares = torch.zeros(2, 2, 4, 4)
    shares[0, 0, 2, 0] = shares[0, 0, 1, 0] = 0.9  # everyone looks there
    shares[0, 1, 2, 0] = 0.3  # this one is it
    shares[1, 0, 2, 1] = 0.9  # the other topic
    shares[1, 1, 3, 0] = 0.9  # only the question does
    reach = maps.reach(shares, torch.tensor([10.0, 10, 10, 10]), text)
    assert reach.flatten().argmax() == 1
    torch.testing.assert_close(reach, torch.tensor([[0.0, 0.03], [-0.09, 0.0]]))


def test_the_head_found_has_the_largest_reach_and_its_own_weights(model, tokenizer):
    text = maps.segments(tokenizer, maps.TEXT, maps.TOPICS)
    ids = torch.tensor([text.ids])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = torch.stack([a[0] for a in model(ids, output_attentions=True, use_cache=False).attentions])
    model.set_attn_implementation("sdpa")
    rows = {i: (text.of == i).nonzero()[:, 0] for i in range(4)}
    rows[0] = rows[0][rows[0] >= 4]

    same, *other = (attentions[:, :, rows[i]][..., rows[j]].mean((-1, -2)) for i, j in ((2, 0), (1, 0), (2, 1)))
    reach = same - torch.maximum(*other)
    found = maps.look(model, text)
    assert (found.layer, found.head) == divmod(int(reach.argmax()), 4)
    assert found.rivals == 8
    torch.testing.assert_close(found.weights, attentions[found.layer, found.head], atol=1e-5, rtol=1e-4)
    assert found.share[2, 0] == pytest.approx(float(same[found.layer, found.head]) * len(rows[0]), rel=1e-4)


def test_the_picture_is_the_same_each_time(model, tokenizer, tmp_path):
    text = maps.segments(tokenizer, maps.TEXT, maps.TOPICS)
    for name in ("a.png", "b.png"):
        maps.draw(maps.look(model, text), text, "tiny", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    height, width, _ = imread(tmp_path / "a.png").shape
    assert width > 1200 < height
