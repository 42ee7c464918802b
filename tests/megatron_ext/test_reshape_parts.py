"""The parts of reshaping that need no other rank: what goes where, and checksums."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_megatron.checksums import checksum
from trimtab_megatron.shards import Holder, Piece, Shard, layer_of, least_bytes, moved_bytes, plan, rounds

SIZE = 24


def shard(start: int, stop: int, name: str = "decoder.layers.0.w", kind: str = "model", item_bytes: int = 4) -> Shard:
    return Shard(name, kind, start, stop, item_bytes)


def test_each_tensor_belongs_to_a_layer_by_its_global_id_or_to_none():
    assert layer_of("decoder.layers.17.mlp.linear_fc1.weight") == 17
    assert layer_of("layers.3.weight") == 3
    assert layer_of("embedding.word_embeddings.weight") is None
    assert layer_of("decoder.players.3.weight") is None


def test_a_rank_keeps_what_it_has_and_takes_the_rest_from_its_replica():
    old = [Holder(0, 0, [shard(0, 24)]), Holder(0, 1, [shard(0, 24)]), Holder(0, 0, []), Holder(0, 1, [])]
    new = [Holder(0, 0, [shard(0, 24)]), Holder(0, 1, []), Holder(0, 0, [shard(0, 24)]), Holder(0, 1, [shard(0, 24)])]
    assert plan(old, new) == [Piece(0, 0, shard(0, 24)), Piece(0, 2, shard(0, 24)), Piece(1, 3, shard(0, 24))]


def test_a_slice_that_shifts_comes_from_all_that_have_parts_of_it():
    old = [Holder(0, 0, [shard(0, 10)]), Holder(0, 1, [shard(10, 24)])]
    new = [Holder(0, 0, [shard(0, 16)]), Holder(0, 1, [shard(16, 24)])]
    pieces = plan(old, new)
    assert pieces == [Piece(0, 0, shard(0, 10)), Piece(1, 0, shard(10, 16)), Piece(1, 1, shard(16, 24))]
    assert moved_bytes(pieces) == 6 * 4


def test_nothing_crosses_planes():
    old = [Holder(0, 0, [shard(0, 24)]), Holder(1, 0, [shard(0, 24)]), Holder(0, 0, []), Holder(1, 0, [])]
    new = [old[2], old[3], old[0], old[1]]
    assert [(piece.source, piece.target) for piece in plan(old, new)] == [(0, 2), (1, 3)]


def test_what_no_rank_holds_is_named():
    with pytest.raises(ValueError, match="no rank holds elements 10 to 12 of exp_avg of w"):
        plan(
            [Holder(0, 0, [shard(0, 10, "w", "exp_avg")]), Holder(0, 1, [shard(12, 24, "w", "exp_avg")])],
            [Holder(0, 0, [shard(0, 24, "w", "exp_avg")])],
        )


def test_a_layer_moves_in_one_round_and_the_least_is_what_is_held_of_layers_that_change():
    names = ["decoder.layers.10.w", "embedding.w", "decoder.layers.9.b", "decoder.layers.9.w"]
    old = [Holder(0, 0, [shard(0, 24, name) for name in names]), Holder(0, 0, [])]
    new = [Holder(0, 0, [shard(0, 24, "embedding.w")]), Holder(0, 0, [shard(0, 24, n) for n in names if "9" in n])]
    together = [[piece.shard.name for piece in pieces] for pieces in rounds(plan(old, new))]
    assert together == [["embedding.w"], ["decoder.layers.9.b", "decoder.layers.9.w"]]
    assert least_bytes(new, [9]) == moved_bytes(plan(old, new)) == 2 * 24 * 4
    assert least_bytes(new, []) == 0


@st.composite
def holders(draw: st.DrawFn, copies: int) -> list[Holder]:
    """Six ranks that hold, in `copies` stages, a tensor of each kind: whole, or each replica a slice of it."""
    ranks = [(stage, replica) for stage in range(3) for replica in range(2)]
    stages = draw(st.permutations(range(3)))[:copies]
    edges = [0, draw(st.integers(0, SIZE)), SIZE]
    held: dict[tuple[int, int], list[Shard]] = {rank: [] for rank in ranks}
    for stage in stages:
        for replica, (start, stop) in enumerate(pairwise(edges)):
            held[stage, replica].append(shard(0, SIZE, "w", "model", 2))
            if start < stop:
                held[stage, replica].append(shard(start, stop, "w", "exp_avg"))
    return [Holder(0, replica, held[stage, replica]) for stage, replica in ranks]


@settings(deadline=None)
@given(st.data())
def test_a_plan_gives_each_rank_each_element_once_from_one_that_has_it(data):
    old, new = data.draw(holders(data.draw(st.integers(1, 2)))), data.draw(holders(1))
    pieces = plan(old, new)
    for rank, holder in enumerate(new):
        wanted = Counter((held.kind, place) for held in holder.shards for place in range(held.start, held.stop))
        given_to = [piece for piece in pieces if piece.target == rank]
        assert wanted == Counter(
            (piece.shard.kind, place) for piece in given_to for place in range(piece.shard.start, piece.shard.stop)
        )
        for piece in given_to:
            places = set(range(piece.shard.start, piece.shard.stop))
            sources = {
                source
                for source, other in enumerate(old)
                for held in other.shards
                if held.kind == piece.shard.kind and places <= set(range(held.start, held.stop))
            }
            assert piece.source in sources
            assert piece.source == rank or rank not in sources
    assert moved_bytes(pieces) == sum(piece.shard.size_bytes for piece in pieces if piece.source != piece.target)


VALUES = st.lists(st.floats(width=32), min_size=1, max_size=40)


@settings(deadline=None)
@given(VALUES, st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_a_checksum_is_the_sum_of_those_of_its_parts(values, data, dtype):
    whole = torch.tensor(values).to(dtype)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3))), len(values)]
    parts = sum(checksum(whole[start:stop], start) for start, stop in pairwise(edges) if start < stop)
    assert parts == checksum(whole, 0)


@settings(deadline=None)
@given(VALUES, st.data())
def test_a_checksum_tells_another_bit_and_another_place(values, data):
    whole = torch.tensor(values)
    place = data.draw(st.integers(0, len(values) - 1))
    flipped = whole.clone()
    flipped.view(torch.int32)[place] ^= 1 << data.draw(st.integers(0, 30))
    assert checksum(flipped, 0) != checksum(whole, 0)
    swapped = whole.flip(0)
    if len(values) == 2 and not torch.equal(swapped.view(torch.int32), whole.view(torch.int32)):
        assert checksum(swapped, 0) != checksum(whole, 0)


def test_a_checksum_goes_over_many_blocks_as_over_one(monkeypatch):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    at_once = checksum(values, 5)
    monkeypatch.setattr("trimtab_megatron.checksums.BLOCK", 7)
    assert checksum(values, 5) == at_once
    assert checksum(values.new_empty(0), 3) == 0
