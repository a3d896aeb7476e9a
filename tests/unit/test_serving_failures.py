"""What goes wrong in a route is told in the form that OpenAI's clients read, by a server and by a front end."""

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp

from symbiosis.cluster.front.app import Front, make_app
from symbiosis.cluster.front.view import View
from symbiosis.serving.http.failures import app_of


async def _break(shared: str, request: Request) -> ASGIApp:
    raise OverflowError(shared)


def _asked(app: ASGIApp, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_an_unexpected_error_is_told_without_what_it_says() -> None:
    answer = _asked(app_of("secret", [("GET", "/x", _break)]), "/x")
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["type"] == "server_error" and answer.headers["x-should-retry"] == "false"
    assert "OverflowError" in error["message"] and "secret" not in answer.text


def test_a_front_end_tells_of_one_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(View("none", {}), None)
    monkeypatch.setattr(front, "models", lambda: 1 // 0)
    answer = _asked(make_app(front), "/health")
    assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]["message"]
    assert _asked(make_app(front), "/nothing").json()["error"]["type"] == "not_found_error"
