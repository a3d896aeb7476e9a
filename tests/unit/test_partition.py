"""Which rank holds what: on plain data."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.errors import ConfigError
from symbiosis.executor.ranks.partition import SizedTensor, ranks_of, whole_layers


def most(sizes: list[int], shares: tuple[float, ...], ranks: list[int]) -> float:
    """What the fullest rank holds, for its share."""
    return max(sum(n for n, at in zip(sizes, ranks, strict=True) if at == r) / shares[r] for r in range(len(shares)))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=9),
    st.lists(st.sampled_from([1.0, 2.0, 0.5, 3.0]), min_size=1, max_size=4),
)
def test_no_other_cut_leaves_the_fullest_rank_with_less(sizes: list[int], shares: list[float]) -> None:
    if len(sizes) < len(shares):
        return
    found = ranks_of(sizes, tuple(shares))
    assert found == sorted(found) and set(found) == set(range(len(shares)))
    cuts = combinations(range(1, len(sizes)), len(shares) - 1)
    ways = [[sum(at >= cut for cut in way) for at in range(len(sizes))] for way in cuts]
    assert most(sizes, tuple(shares), found) <= min(most(sizes, tuple(shares), way) for way in ways) * (1 + 1e-9)


def llama(layers: int) -> list[SizedTensor]:
    parts = [SizedTensor("model.embed_tokens", "model.embed_tokens", 100)]
    for n in range(layers):
        at = f"model.layers.{n}"
        parts += [
            SizedTensor(f"{at}.self_attn.{name}", f"{at}.self_attn.{name}", 10)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ]
        parts += [
            SizedTensor(f"{at}.mlp.{name}", f"{at}.mlp.{name}", 30) for name in ("gate_proj", "up_proj", "down_proj")
        ]
        parts += [SizedTensor(f"{at}.input_layernorm.weight", f"{at}.input_layernorm", 1)]
    return [*parts, SizedTensor("model.norm.weight", "model.norm", 1), SizedTensor("lm_head", "lm_head", 100)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_what_shares_its_input_stays_together(ranks: int) -> None:
    held = whole_layers(llama(8), (1.0,) * ranks)
    for n in range(8):
        attention = {held[f"model.layers.{n}.self_attn.{name}"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        assert len(attention) == 1
        assert held[f"model.layers.{n}.mlp.gate_proj"] == held[f"model.layers.{n}.mlp.up_proj"]
    assert set(held.values()) == set(range(ranks))


def test_shares_are_by_bytes() -> None:
    parts = llama(16)
    held = whole_layers(parts, (3.0, 1.0))
    nbytes = [sum(part.nbytes for part in parts if held[part.name] == rank) for rank in (0, 1)]
    assert abs(nbytes[0] / sum(nbytes) - 0.75) < 0.05


def test_a_tied_head_lies_with_the_embedding_and_counts_once() -> None:
    parts = llama(4)
    parts[-1] = SizedTensor("lm_head", "lm_head", 100, tied_to="model.embed_tokens")
    held = whole_layers(parts, (1.0, 1.0))
    assert held["lm_head"] == held["model.embed_tokens"] == 0
    assert held["model.layers.3.mlp.down_proj"] == 1


def test_more_ranks_than_there_are_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 parts that can be held apart, and there are 4 ranks"):
        whole_layers([SizedTensor(f"{n}.a", f"{n}.a", 1) for n in range(3)], (1.0,) * 4)
