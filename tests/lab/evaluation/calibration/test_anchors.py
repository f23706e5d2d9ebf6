"""Anchors, head maps and the similarity of layers, against loops and brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate.lab.evaluation.calibration.anchors import (
    best_anchors,
    choose,
    grown,
    head_map,
    improved,
    layer_similarity,
    pair_similarity,
)

T, L, H = 3, 4, 3


def drawn(seed, tiles=T, layers=L, heads=H):
    """What a prompt shows: each head's own choice holds the most, and layers know nothing of later ones."""
    captured = torch.rand(tiles, layers, heads, layers, heads, generator=torch.Generator().manual_seed(seed))
    for a, b in itertools.product(range(layers), repeat=2):
        if a > b:
            captured[:, a, :, b] = 0
    for b, j in itertools.product(range(layers), range(heads)):
        captured[:, b, j, b, j] = 1 + captured[:, :, :, b, j].amax((1, 2))
    return captured


def worth(similarity, anchors):
    """Each layer reads the last anchor that is not after it."""
    return sum(
        float(similarity[max(anchor for anchor in anchors if anchor <= layer), layer])
        for layer in range(len(similarity))
    )


class TestTheBestAnchors:
    @given(layers=st.integers(1, 8), seed=st.integers(0, 999), zeros=st.booleans())
    def test_are_those_of_brute_force(self, layers, seed, zeros):
        similarity = torch.rand(layers, layers, generator=torch.Generator().manual_seed(seed))
        if zeros:  # what an anchor would be worth to layers before it must not count
            similarity = similarity.triu()
        found = best_anchors(similarity, layers)
        assert [len(anchors) for anchors, _ in found] == list(range(1, layers + 1))
        for number, (anchors, value) in enumerate(found, 1):
            every = [(0, *rest) for rest in itertools.combinations(range(1, layers), number - 1)]
            best = max(worth(similarity, some) for some in every)
            assert anchors[0] == 0
            assert anchors == sorted(set(anchors))
            assert value == pytest.approx(best)
            assert worth(similarity, anchors) == pytest.approx(best)

    def test_begin_at_the_first_layer_though_another_would_be_better(self):
        similarity = torch.zeros(3, 3)
        similarity[1, 1:] = 9
        assert best_anchors(similarity, 1) == [([0], 0.0)]
        assert best_anchors(similarity, 2)[1] == ([0, 1], 18.0)

    def test_may_be_worth_less_than_nothing(self):
        assert best_anchors(-torch.ones(3, 3), 3) == [([0], -3.0), ([0, 1], -3.0), ([0, 1, 2], -3.0)]

    @pytest.mark.parametrize("number", [0, 4, -1])
    def test_are_as_many_as_there_can_be(self, number):
        with pytest.raises(ValueError, match=f"anchors must be a number from 1 to 3, .* not {number}"):
            best_anchors(torch.ones(3, 3), number)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_need_finite_similarities(self, value):
        similarity = torch.ones(3, 3)
        similarity[1, 2] = value
        with pytest.raises(ValueError, match="not finite"):
            best_anchors(similarity, 2)


class TestSimilarity:
    def test_of_heads_is_the_share_of_their_own_choice(self):
        captured = drawn(0)
        pairs = pair_similarity(captured)
        for a, i, b, j in itertools.product(range(L), range(H), range(L), range(H)):
            shares = [captured[t, a, i, b, j] / captured[t, b, j, b, j] for t in range(T)]
            assert float(pairs[a, i, b, j]) == pytest.approx(float(sum(shares)) / T)

    def test_of_layers_is_that_of_all_heads_together(self):
        captured = drawn(1)
        maps = torch.randint(H, (L, L, H), generator=torch.Generator().manual_seed(2))
        found = layer_similarity(captured, maps)
        for a, b in itertools.product(range(L), repeat=2):
            for t in range(T):
                held = sum(captured[t, a, int(maps[a, b, j]), b, j] for j in range(H))
                ratio = float(held / sum(captured[t, b, j, b, j] for j in range(H)))
                assert float(found[t, a, b]) == pytest.approx(ratio)

    def test_of_a_layer_to_itself_is_one_and_to_earlier_ones_none(self):
        captured = drawn(3)
        for similarity in layer_similarity(captured, head_map(pair_similarity(captured))):
            assert similarity.diagonal().tolist() == [1.0] * L
            assert not similarity.tril(-1).any()

    def test_of_heads_that_attend_to_nothing_is_a_number(self):
        assert pair_similarity(torch.zeros(1, 2, 2, 2, 2)).isfinite().all()


class TestHeadMaps:
    def test_may_send_many_heads_to_one(self):
        pairs = torch.zeros(2, 3, 2, 3)
        pairs[0, 1, 1] = 0.9
        pairs[0, 2, 1, 2] = 0.95
        assert head_map(pairs)[0, 1].tolist() == [1, 1, 2]

    def test_take_of_heads_as_similar_that_of_the_same_number_else_the_first(self):
        pairs = torch.zeros(2, 3, 2, 3)
        pairs[0, :, 1, 0] = torch.tensor([0.5, 0.5, 0.5])
        pairs[0, :, 1, 1] = torch.tensor([0.7, 0.7, 0.1])
        pairs[0, :, 1, 2] = torch.tensor([0.8, 0.8, 0.1])
        assert head_map(pairs)[0, 1].tolist() == [0, 1, 0]

    def test_take_the_more_similar_head_however_little_more(self):
        pairs = torch.zeros(2, 2, 2, 2)
        pairs[0, :, 1, 0] = torch.tensor([0.5, 0.50001])
        assert head_map(pairs)[0, 1, 0] == 1


class TestTheChoice:
    def test_is_made_by_the_mean_over_prompts_of_the_least_over_tiles_weighted_by_importance(self):
        prompts, importance = [drawn(4), drawn(5, tiles=2)], torch.tensor([0.9, 0.1, 0.5, 0.3])
        choice = choose(lambda: iter(prompts), importance, 2)
        maps = head_map(sum(map(pair_similarity, prompts)) / 2)
        of_prompts = [layer_similarity(captured, maps) for captured in prompts]
        torch.testing.assert_close(choice.similarity, sum(of_tiles.amin(0) for of_tiles in of_prompts) / 2)
        torch.testing.assert_close(choice.mean_similarity, sum(of_tiles.mean(0) for of_tiles in of_prompts) / 2)
        for a, b in itertools.product(range(L), repeat=2):
            assert float(choice.worth[a, b]) == pytest.approx(float(choice.similarity[a, b] * importance[b]))
        best = max(([0, other] for other in range(1, L)), key=lambda anchors: worth(choice.worth, anchors))
        assert choice.anchors == best
        assert choice.by_number == best_anchors(choice.worth, L)
        assert choice.heads == {
            layer: maps[max(one for one in best if one <= layer), layer].tolist()
            for layer in range(L)
            if layer not in best
        }

    def test_looks_at_layers_by_their_importance(self):
        captured = torch.zeros(1, 3, 1, 3, 1)
        captured[0, :, 0, :, 0] = torch.tensor([[1.0, 0.5, 0.4], [0, 1.0, 0.4], [0, 0, 1.0]])
        for importance, anchors in (([1.0, 1.0, 0.1], [0, 1]), ([1.0, 0.1, 1.0], [0, 2])):
            assert choose(lambda: [captured], torch.tensor(importance), 2).anchors == anchors

    def test_reads_each_prompt_twice_and_keeps_none(self):
        read = []

        def prompts():
            for seed in range(3):
                read.append(seed)
                yield drawn(seed)

        choose(prompts, torch.ones(L), 1)
        assert read == [0, 1, 2, 0, 1, 2]

    @pytest.mark.parametrize("number", [0, L + 1])
    def test_is_of_as_many_anchors_as_there_can_be(self, number):
        with pytest.raises(ValueError, match=f"from 1 to {L}"):
            choose(lambda: [drawn(0)], torch.ones(L), number)

    def test_needs_finite_values(self):
        with pytest.raises(ValueError, match="not finite"):
            choose(lambda: [drawn(0)], torch.tensor([1.0, math.nan, 1, 1]), 1)


class TestGrown:
    def test_takes_the_best_each_time(self):
        asked = []

        def losses(turn, tried):
            asked.append((turn, tried))
            return [9.0 - sum(layer in (0, 2, 3) for layer in anchors) + 0.1 * (4 in anchors) for anchors in tried]

        path = grown(5, losses, 3)
        assert path == [([0], 8.0), ([0, 2], 7.0), ([0, 2, 3], 6.0)]
        assert asked[0] == (0, [[0]])
        assert asked[1] == (1, [[0, 1], [0, 2], [0, 3], [0, 4]])
        assert asked[2] == (2, [[0, 1, 2], [0, 2, 3], [0, 2, 4]])

    def test_up_to_all_layers(self):
        assert [anchors for anchors, _ in grown(3, lambda _, tried: [0.0] * len(tried), 3)] == [[0], [0, 1], [0, 1, 2]]
        with pytest.raises(ValueError, match="anchors must be a number from 1 to 3"):
            grown(3, lambda *_: pytest.fail("asked"), 4)


class TestImproved:
    @staticmethod
    def losses(worst):
        """What is lost is the distance to the best anchors; the rounds that were asked for."""
        asked = []

        def of(number, tried):
            asked.append(number)
            return [1.0 + sum(abs(a - b) for a, b in zip(anchors, worst, strict=True)) for anchors in tried]

        return of, asked

    def test_one_place_after_the_other(self):
        losses, asked = self.losses([0, 4, 7])
        path = improved([0, 1, 2], 9, losses, 10)
        assert [anchors for anchors, _ in path] == [[0, 1, 2], [0, 2, 7], [0, 4, 7]]
        assert [lost for _, lost in path] == [9.0, 3.0, 1.0]
        assert asked == [0, 1, 2], "the last finds nothing better"

    def test_no_more_rounds_than_asked_for(self):
        losses, asked = self.losses([0, 4, 7])
        assert improved([0, 1, 2], 9, losses, 1)[-1][0] == [0, 2, 7]
        assert asked == [0]
        assert improved([0, 1, 2], 9, losses, 0) == []

    def test_the_first_stays(self):
        tried = []
        improved([2, 5], 7, lambda _, some: tried.extend(some) or [1.0] * len(some), 1)
        assert tried == [[2, 5], [2, 3], [2, 4], [2, 6]]

    @pytest.mark.parametrize(("anchors", "layers"), [([0], 5), ([0, 1, 2], 3)])
    def test_nothing_to_try(self, anchors, layers):
        assert improved(anchors, layers, lambda *_: pytest.fail("asked"), 3) == []

    def test_what_wins_next_to_nothing_is_left(self):
        assert improved([0, 1], 3, lambda *_: [1.0, 0.995], 3) == [([0, 1], 1.0)]
