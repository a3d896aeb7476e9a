"""What goes wrong in a route is told in the form that OpenAI's clients read, by a server and by a front end."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp

from symbiosis.cluster.plan import ModelPlan, Plan
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.errors import ConfigError
from symbiosis.server.api_app import Api, ApiState
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions
from symbiosis.server.openai_api import make_app as make_server
from symbiosis.server.serving_state import ServingState
from symbiosis.serving.serve_options import ServeOptions
from tests.secret_files import write_secret
from tests.unit.test_serving_detokenize import bytes_tokenizer


async def _break(state: ApiState, request: Request) -> ASGIApp:
    raise OverflowError("secret")


def _asked(app: ASGIApp, path: str, headers: Sequence[tuple[str, str]] = ()) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=list(headers))

    return asyncio.run(ask())


def served(**options: Any) -> ASGIApp:
    welcome = EngineReady(model="demo", longest=64, most_tokens=64, vocabulary=8)
    remote: Any = SimpleNamespace(welcome=welcome, places=None)
    return make_server(ServingState(remote, bytes_tokenizer(), FrontOptions(model="demo", folder="", **options)))


def test_an_unexpected_error_is_told_without_what_it_says() -> None:
    answer = _asked(Api(ApiState(None), [("GET", "/x", _break)]), "/x")
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["type"] == "server_error" and answer.headers["x-should-retry"] == "false"
    assert "OverflowError" in error["message"] and "secret" not in answer.text


def test_a_front_end_tells_of_one_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    front = RouterState(ServerRegistry("none", {}), None)
    monkeypatch.setattr(front.view, "look", lambda: 1 // 0)
    answer = _asked(make_app(front), "/v1/models")
    assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]["message"]
    assert _asked(make_app(front), "/nothing").json()["error"]["type"] == "not_found_error"


REBOUND = (
    "rebound.example.com",
    "rebound.example.com:8000",
    "localhost.example.com",
    "127.0.0.1.example.com",
    "10.0.0.7",
    "[::2]",
    "a b",
    "",
    "x@127.0.0.1",
)
KNOWN = ("localhost", "LOCALHOST.:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", socket.gethostname())


@pytest.mark.parametrize("of", ["server", "cluster"])
def test_a_page_whose_name_leads_here_is_turned_away(of: str) -> None:
    known: Any = {"allowed_hosts": ("llm.example.org", "*.lab.example.org")}
    for options, hosts, status in (
        ({}, REBOUND, 400), ({}, KNOWN, 404), (known, ("llm.example.org:443", "a.lab.example.org", *KNOWN), 404),
        (known, ("evil-llm.example.org", "lab.example.org", *REBOUND), 400), ({"host": "0.0.0.0"}, REBOUND[:4], 400),
        ({"host": "0.0.0.0"}, ("10.0.0.7:8000", "[::2]", *KNOWN), 404), ({"host": "llm"}, ("llm:8000",), 404), ({"allowed_hosts": ("*",)}, REBOUND, 404),
    ):  # fmt: skip
        app = (
            make_app(RouterState(ServerRegistry("none", {}), None, **options)) if of == "cluster" else served(**options)
        )
        for host in hosts:
            answer = _asked(app, "/nothing", [("host", host)])
            assert answer.status_code == status, (options, host)
            assert status == 404 or "--allowed-hosts" in answer.json()["error"]["message"]
    assert _asked(app, "/nothing", [("host", "localhost"), ("host", "*")]).status_code == 404
    assert _asked(served(), "/nothing", [("host", "localhost"), ("host", "rebound.example.com")]).status_code == 400


def test_where_keys_are_needed_any_name_will_do_unless_some_are_given(tmp_path: Path) -> None:
    keys = write_secret(tmp_path / "keys", "anna sk-anna-1234\n")
    keys.chmod(0o600)
    for names, status in (((), 404), (("llm.example.org",), 400)):
        for app in (
            make_app(RouterState(ServerRegistry("none", {}), str(keys), allowed_hosts=names)),
            served(api_keys=str(keys), allowed_hosts=names),
        ):
            assert _asked(app, "/nothing", [("host", "api.example.org")]).status_code == status


@pytest.mark.parametrize("name", ["http://x", "x:80", "", "a..b", "*x", "x/", "a b"])
def test_what_is_no_name_is_refused_when_a_server_starts(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed-hosts has"):
        ServeOptions(allowed_hosts=(name,))
    with pytest.raises(ConfigError, match="allowed-hosts has"):
        Plan(models={"demo": ModelPlan()}, allowed_hosts=("x", name))
