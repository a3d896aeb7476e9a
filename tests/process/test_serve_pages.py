"""Pages of other sites that are allowed (CORS), a path that a proxy puts in front, and the description of all routes."""

from collections.abc import Iterator
from typing import Any

import pytest

from symbiosis.server.cors import Cors
from tests.serving_api import Api, demo_engine, http_process, web

ORIGIN = "https://example.org"
HEADER = "access-control-allow-origin"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with demo_engine() as engine, http_process(engine, cors=Cors((ORIGIN,)), root_path="/llm") as api:
        yield api


def posted(api: Api, origin: str, path: str = "/v1/completions", **fields: Any) -> Any:
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, **fields}
    return web.post(api.url + path, json=body, headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"}, timeout=60)


def test_pages_of_an_allowed_origin_may_use_the_server(api: Api) -> None:
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    before = web.options(api.url + "/v1/completions", headers=asks, timeout=60)
    assert before.status_code == 200 and before.headers[HEADER] == ORIGIN
    answer = posted(api, ORIGIN)
    assert answer.status_code == 200 and answer.headers[HEADER] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    wrong = posted(api, ORIGIN, speed=1)
    assert wrong.status_code == 400 and wrong.headers[HEADER] == ORIGIN
    stream = posted(api, ORIGIN, stream=True)
    assert stream.headers[HEADER] == ORIGIN and "[DONE]" in stream.text


def test_pages_of_others_may_not(api: Api) -> None:
    answer = posted(api, "https://evil.example")
    assert answer.status_code == 403 and HEADER not in answer.headers
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert web.options(api.url + "/v1/completions", headers=asks, timeout=60).status_code == 400


@pytest.mark.parametrize("path", ["/llm/health", "/health", "/llm/", "/llm"])
def test_paths_with_the_proxys_and_without_it(api: Api, path: str) -> None:
    assert web.get(api.url + path, timeout=60).status_code == 200


def test_a_completion_behind_the_proxys_path(api: Api) -> None:
    assert posted(api, ORIGIN, path="/llm/v1/completions").json()["usage"]["completion_tokens"] == 1
    assert posted(api, ORIGIN, path="/llmx/v1/completions").status_code == 404
    assert 'path="/v1/completions"' in web.get(api.url + "/metrics", timeout=60).text


def test_a_method_that_a_path_has_not_got(api: Api) -> None:
    for path, allowed in (("/v1/completions", "POST"), ("/", "GET, HEAD, POST"), ("/v1/adapters/x", "DELETE, PUT")):
        answer = web.request("TRACE", api.url + path, timeout=60)
        assert answer.status_code == 405 and answer.headers["allow"] == allowed


def test_the_description_is_what_is_read(api: Api) -> None:
    """Of each body that is described, each field is one that the struct has, and none is missing."""
    told = web.get(api.url + "/llm/openapi.json", timeout=60).json()
    assert told["servers"] == [{"url": "/llm"}] and told["openapi"].startswith("3.1")
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/generate",
        "/tokenize",
        "/v1/models/{name}",
    ):
        assert path in told["paths"], path
    chat = told["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"]
    assert {"type": "null"} in chat["properties"]["temperature"]["anyOf"]
    assert chat["properties"]["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert chat["properties"]["n"]["anyOf"][0]["maximum"] == 128


def test_every_route_with_a_body_reads_what_it_describes(api: Api) -> None:
    told = web.get(api.url + "/openapi.json", timeout=60).json()
    for path, methods in told["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        answer = web.post(api.url + path, json={"no such field": 1}, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "no such field", path
