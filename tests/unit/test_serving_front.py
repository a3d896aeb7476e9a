"""What the front decides by the size of a body: what it refuses before anything is made of it, and what is made in a thread."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from symbiosis.serving.http.failures import ApiError
from symbiosis.serving.http.front import Front, _check_continuation
from symbiosis.serving.http.link.lanes import LARGE, MANY_CHOICES, Lanes
from symbiosis.serving.http.schemas import Continuation
from symbiosis.serving.request import Request


@pytest.mark.parametrize("ended", [[0, 0], [3, 1, 3], [4], [-1], [0] * 4, [0, 1, 2, 3, 0]])
def test_choices_that_have_ended_are_named_once_and_exist(ended: list[int]) -> None:
    with pytest.raises(ApiError, match="each once, which are numbered from 0 to 3") as error:
        _check_continuation(Continuation("x", 1, ended=ended), completions=4, longest=8)
    assert error.value.status == 400


@pytest.mark.parametrize("ended", [[], [3], [2, 0], [3, 2, 1, 0]])
def test_each_prompt_is_told_which_of_its_completions_have_ended(ended: list[int]) -> None:
    before = Continuation("x", 1, ended=ended)
    _check_continuation(before, completions=4, longest=8)
    by_prompt = before.ended_of(2)
    for prompt in range(2):
        those = by_prompt.get(prompt, ())
        assert set(those) == {each - prompt * 2 for each in ended if each // 2 == prompt}
        left = Request(id=1, prompt=(0,), completions=2, ended=those).under_way
        assert left == [each for each in range(2) if each + prompt * 2 not in ended]


@pytest.mark.parametrize(
    ("size", "choices", "in_thread"),
    [(LARGE, MANY_CHOICES, False), (LARGE + 1, 1, True), (100, MANY_CHOICES + 1, True)],
)
def test_what_takes_long_is_made_in_a_thread(size: int, choices: int, in_thread: bool) -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    lanes = Lanes(2, "test-front")
    front = cast(Front, SimpleNamespace(_lanes=lanes))
    request, tenant = cast(Any, SimpleNamespace(receive=never)), cast(Any, SimpleNamespace(name="anna"))
    made = asyncio.run(Front.made(front, request, tenant, size, choices, threading.current_thread))
    assert (made is not threading.current_thread()) == in_thread
    lanes.close()
