"""How long a text a server takes: what fits its memory, beside an adapter, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from symbiosis.serving.engine.limits import Unfit, check, fitted, most_tokens
from symbiosis.serving.kv_cache.block_manager import BlockManager
from symbiosis.serving.kv_cache.page_pool import PagePool
from symbiosis.serving.request import Request, Sampling
from symbiosis.serving.scheduler.scheduler_output import BLOCK

LAYERS, PAGES = 2, 10  # so that five blocks fit


def served(longest: int = 1000) -> Any:
    pool = PagePool(PAGES)
    arena = SimpleNamespace(pool=pool)
    return SimpleNamespace(arena=arena, blocks=BlockManager(pool, LAYERS), longest=longest, vocabulary=50)


def request(prompt: int, most: int, **more: Any) -> Request:
    return Request(id=1, prompt=(7,) * prompt, sampling=Sampling(max_tokens=most), **more)


@pytest.mark.parametrize(("adapter_pages", "blocks"), [(0, 5), (1, 4), (2, 4), (3, 3), (9, 0)])
def test_so_many_tokens_fit_beside_an_adapter(adapter_pages: int, blocks: int) -> None:
    assert most_tokens(served(), None, adapter_pages) == blocks * BLOCK
    assert most_tokens(served(longest=30), None, adapter_pages) == min(30, blocks * BLOCK)


@pytest.mark.parametrize(
    ("prompt", "most", "left"), [(20, 1000, 55), (20, 55, 55), (20, 54, 54), (74, 9, 1), (75, 9, 1)]
)
def test_an_answer_may_be_as_long_as_fits(prompt: int, most: int, left: int) -> None:
    """Beside five tokens of the adapter's. What does not fit at all is for `check` to refuse."""
    short = fitted(request(prompt, most), 5, 0, served(), None)
    assert short.sampling.max_tokens == left and short.prompt == (7,) * prompt


def test_what_fits_exactly_is_taken() -> None:
    check(request(70, 5), 5, 0, served(), None)
    check(request(54, 5), 5, 2, served(), None)
    check(request(20, 5), 5, 0, served(longest=30), None)
    check(request(20, 1), 0, 0, served(), None)
    check(request(20, 0, prompt_logprobs=1), 0, 0, served(), None)


@pytest.mark.parametrize(
    ("prompt", "most", "adapter_pages", "longest", "message"),
    [
        (71, 5, 0, 1000, "81 tokens, take 12 pages of the server's memory, which has 10"),
        (70, 5, 1, 1000, "80 tokens, take 11 pages"),
        (21, 5, 0, 30, "of 26 tokens and max_tokens=5 are 31 together, and the model takes 30"),
        (20, 0, 0, 1000, "must be at least 1, not 0"),
    ],
)
def test_what_is_longer_is_refused(prompt: int, most: int, adapter_pages: int, longest: int, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        check(request(prompt, most), 5, adapter_pages, served(longest), None)
