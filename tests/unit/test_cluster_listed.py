"""What a front end lists can be asked for there, and what the cluster tells holds from the next request on."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from symbiosis.cluster.router import app
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.protocol.cluster_state import Member, Told, folder_of, tell

LISTED = {  # what the server of each model says
    "one": ["one", "python", "shout"],
    "two": ["two", "python", "mine"],
    "three": ["three", "python", "builtin"],
}
URLS = {model: f"http://127.0.0.1:{port}" for port, model in enumerate(LISTED, 1)}  # where nobody listens
FOLDERS = ("one", "two")  # the models that have a folder of adapters


SAID: dict[str, Any] = {}  # by URL: what a server says instead


def tell_of(folder: Path, *models: str, **more: Any) -> None:
    members = tuple(
        Member(name=f"{model}-server-1", kind="server", model=model, number=n, url=URLS[model], state="ready", batch=8)
        for n, model in enumerate(models, 1)
    )
    adapters = {model: str(folder / model) for model in FOLDERS}
    tell(Told(name="lab", url="", members=members, adapters=adapters, **more))


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RouterState:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder_of("lab").mkdir(parents=True)
    for model in FOLDERS:
        for name in LISTED[model][1:]:
            (tmp_path / model / name).mkdir(parents=True)
            (tmp_path / model / name / "adapter_config.json").touch()
    models = {URLS[model]: {"data": [{"id": name} for name in names]} for model, names in LISTED.items()}

    async def answer_of(url: str, path: str, headers: dict[str, str]) -> Any:
        return SAID.get(url, models.get(url))

    monkeypatch.setattr(app, "answer_of", answer_of)
    monkeypatch.setattr(
        ServerRegistry, "_lose", lambda view, seen: None
    )  # they do not answer, and get the next request all the same
    return RouterState(ServerRegistry("lab", {}), None)


def ask(front: RouterState, method: str, path: str, **body: Any) -> Any:
    """What is answered, or the model whose server gets the request. (It does not answer.)"""
    front.view.decisions.clear()

    async def run() -> Any:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(front)), base_url="http://localhost"
        ) as http:
            answer = asyncio.create_task(http.request(method, path, json=body or None))
            while not answer.done() and not front.view.decisions:
                await asyncio.sleep(0.001)
            if answer.done():
                return answer.result().json()
            answer.cancel()
            return front.view.decisions[0]["model"]

    return asyncio.run(run())


def listed(front: RouterState) -> list[str]:
    return [each["id"] for each in ask(front, "GET", "/v1/models")["data"]]


def goes_to(front: RouterState, name: str) -> Any:
    return ask(front, "POST", "/v1/completions", model=name, prompt="a")


def test_what_is_listed_is_listed_once_and_can_be_asked_for(front: RouterState, tmp_path: Path) -> None:
    tell_of(tmp_path, *LISTED, aliases={"talk": {"one": 1.0}, "shout": {"two": 1.0}})
    names = listed(front)
    assert sorted(names) == ["mine", "one", "python", "shout", "talk", "three", "two"]
    wanted = {"python": "one", "talk": "one", "shout": "two", "mine": "two"}
    assert {name: goes_to(front, name) for name in names} == {name: wanted.get(name, name) for name in names}
    assert (
        "no model 'builtin'" in ask(front, "POST", "/v1/completions", model="builtin", prompt="a")["error"]["message"]
    )


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        {"data": None},
        {"data": ["one"]},
        {"data": [{"id": 7}]},
        {"data": [{"id": "one", "max_model_len": "many"}]},
    ],
)
def test_a_server_that_lists_nonsense_hides_no_other_model(
    front: RouterState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    monkeypatch.setitem(SAID, URLS["one"], said)
    tell_of(tmp_path, *LISTED)
    assert listed(front) == ["two", "mine", "three"], "python is one's"


def test_the_only_model_lists_what_its_server_does(front: RouterState, tmp_path: Path) -> None:
    tell_of(tmp_path, "three")
    assert listed(front) == LISTED["three"] and goes_to(front, "builtin") == "three"


def test_what_the_cluster_tells_holds_from_the_next_request_on(front: RouterState, tmp_path: Path) -> None:
    file = folder_of("lab") / "told.json"
    tell_of(tmp_path, "one", "two", aliases={"talk": {"one": 1.0}})
    at = file.stat().st_mtime_ns
    assert goes_to(front, "talk") == "one"
    tell_of(tmp_path, "one", "two", aliases={"talk": {"two": 1.0}})
    os.utime(file, ns=(at, at))  # both were written within one tick of the clock
    assert goes_to(front, "talk") == "two"
    tell_of(tmp_path, "one", "two", retiring=("one",))
    assert listed(front) == LISTED["two"]


@pytest.mark.parametrize(
    ("name", "model", "told"),
    [
        ("new", "one", "one retires, and takes no new adapters"),
        ("new", "nobody", "no model 'nobody' has adapters here: two may have"),
        ("new", "talk", "no model 'talk' has adapters here: two may have"),
        ("talk", "two", "'talk' is the name of a model"),
    ],
)
def test_an_adapter_that_cannot_be_sent_is_told_why(
    front: RouterState, tmp_path: Path, name: str, model: str, told: str
) -> None:
    tell_of(tmp_path, "one", "two", aliases={"talk": {"two": 1.0}}, retiring=("one",))
    assert told in ask(front, "PUT", f"/v1/adapters/{name}?model={model}")["error"]["message"]
    assert not list(tmp_path.glob("*/.sent"))
