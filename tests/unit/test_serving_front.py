"""What the front decides by the size of a body: what it refuses before anything is made of it, and what is made in a thread."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from symbiosis.server.api_errors import ApiError
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions
from symbiosis.server.ipc.tenant_threads import LARGE, MANY_CHOICES, TenantThreads
from symbiosis.server.openai_protocol import Continuation
from symbiosis.server.serving_state import ServingState, _check_continuation
from symbiosis.serving.engine.engine_stats import EngineStats
from symbiosis.serving.request import Request
from tests.unit.test_serving_detokenize import bytes_tokenizer


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

    lanes = TenantThreads(2, "test-front")
    front = cast(ServingState, SimpleNamespace(threads=lanes))
    request, tenant = cast(Any, SimpleNamespace(receive=never)), cast(Any, SimpleNamespace(name="anna"))
    made = asyncio.run(ServingState.made(front, request, tenant, size, choices, threading.current_thread))
    assert (made is not threading.current_thread()) == in_thread
    lanes.close()


def keyed(tmp_path: Path, most: int) -> ServingState:
    """A front end that two tenants have keys of."""
    file = tmp_path / "keys"
    file.write_text("eve eves-own-key\nbob bobs-own-key\n")
    file.chmod(0o600)
    welcome = EngineReady(model="demo", longest=64, most_tokens=64, vocabulary=8)
    remote: Any = SimpleNamespace(welcome=welcome, drained=asyncio.Event(), requests={}, places=None)
    return ServingState(
        remote, bytes_tokenizer(), FrontOptions(model="demo", folder="", api_keys=str(file), max_requests=most)
    )


def test_what_is_prepared_waits(tmp_path: Path) -> None:
    """... and what the engine has not taken, so that what runs and what waits are all that is under way."""
    front = keyed(tmp_path, most=12)

    async def told(kind: type, verb: str) -> EngineStats:
        return EngineStats(running=2, waiting=1)

    front.remote.ask, front.remote.completions = told, 5  # type: ignore[method-assign, misc]
    body: Any = SimpleNamespace(n=2, continuation=None)
    with front.admitted(front.keys.tenant("Bearer eves-own-key"), body, 2, 1):
        found = asyncio.run(front.figures())
    assert (found.running, found.waiting) == (2, 7)
    after = asyncio.run(front.figures())
    assert (after.running, after.waiting) == (2, 3)


def test_one_key_leaves_places_for_the_next(tmp_path: Path) -> None:
    front = keyed(tmp_path, most=12)
    eve, bob = (front.keys.tenant(f"Bearer {name}s-own-key") for name in ("eve", "bob"))
    body: Any = SimpleNamespace(n=1, continuation=None)
    with pytest.raises(ApiError, match="at most 6 completions of one key") as error, front.admitted(eve, body, 7, 1):
        pass
    assert error.value.status == 400
    front.remote.places.take("eve", 6)  # which the engine has not ended, whatever became of the clients
    for _ in range(2):
        with pytest.raises(ApiError, match="its part") as error, front.admitted(eve, body, 1, 1):
            pass
        assert error.value.status == 503 and eve.under_way == 0
    with front.admitted(bob, body, 3, 1) as his:
        his.end()
    front.remote.places.give_back("eve", 6)
    with front.admitted(eve, body, 6, 1) as again:
        again.end()
    assert eve.under_way == bob.under_way == 0


def test_a_key_may_ask_however_few_requests_there_may_be(tmp_path: Path) -> None:
    front = keyed(tmp_path, most=1)
    body: Any = SimpleNamespace(n=1, continuation=None)
    with front.admitted(front.keys.tenant("Bearer eves-own-key"), body, 1, 1) as admission:
        admission.end()
