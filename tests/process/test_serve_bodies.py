"""Whatever a body says, the answer is a completion, or an error of OpenAI's shape that names the client's mistake and no path of the server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.server.openai_api import LoadBody, UnloadBody
from symbiosis.server.openai_protocol import ChatBody, CompletionBody
from symbiosis.serving import Engine
from tests.serving_api import Api, http_process, web

ROUTES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"model": "demo", "prompt": "def", "max_tokens": 2}),
    "/v1/chat/completions": (
        ChatBody,
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "x"}],
            "max_completion_tokens": 2,
            "chat_template_kwargs": {"word": "!"},
        },
    ),
    "/v1/load_lora_adapter": (LoadBody, {"lora_name": "x", "lora_path": "python"}),
    "/v1/unload_lora_adapter": (UnloadBody, {"lora_name": "x"}),
}
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "\ud800", "a\udfffb", "\x00", "/etc/passwd", "../..", "python", "json_object", "json_schema"])
)  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 1e308, 5e-324, float("nan"), float("inf"), -0.0]),
    st.floats(),
    TEXTS,
)
VALUES = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": st.fixed_dictionaries({"schema": LEAVES | st.dictionaries(TEXTS, LEAVES)}),
        }
    ),
    st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", ""]), "content": LEAVES})),
    st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
    ),
)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer, with a template."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + word }}\n{% endfor %}"
    folder = tmp_path_factory.mktemp("chatting")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def api(chatting: Path) -> Iterator[Api]:
    with (
        symbiosis.Executor("demo") as executor,
        Engine(executor.endpoint, DEMO_MODEL, adapters=DEMO_MODEL / "adapters", memory=1 << 25) as engine,
        http_process(engine, adapters=str(DEMO_MODEL / "adapters"), folder=str(chatting)) as api,
    ):
        yield api


def check(api: Api, path: str, body: str | bytes) -> None:
    answer = web.post(f"{api.url}{path}", content=body, timeout=60)
    assert answer.status_code in (200, 400, 404, 503), (answer.status_code, answer.text)
    assert answer.status_code != 503 or "n" in json.loads(body), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        assert str(DEMO_MODEL.parent) not in answer.text and "/tmp/" not in answer.text, error


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_values_in_any_field_are_the_clients_mistake(api: Api, path: str, data: st.DataObject) -> None:
    kind, whole = ROUTES[path]
    changes = data.draw(st.dictionaries(st.sampled_from(kind.__struct_fields__), VALUES, min_size=1, max_size=2))  # type: ignore[attr-defined]
    check(api, path, json.dumps(whole | changes))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("levels", [100, 3000, 200_000])
def test_deep_lists(api: Api, path: str, levels: int) -> None:
    kind, whole = ROUTES[path]
    for field in kind.__struct_fields__:  # type: ignore[attr-defined]
        told = json.dumps({name: value for name, value in whole.items() if name != field})
        check(api, path, f'{told[:-1]}, "{field}": {deep(levels)}}}')


@pytest.mark.parametrize("path", ROUTES)
@example(b"\xff\xfe{}")
@example(b'{"model": "demo", "prompt": "\xed\xa0\x80"}')
@example(b'{"lora_name": "\\ud800", "lora_path": "\\ud800"}')
@example(b'{"lora_name": "x", "lora_path": "\\u0000"}')
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=30))
def test_bytes_that_are_no_body(api: Api, path: str, body: bytes) -> None:
    answer = web.post(f"{api.url}{path}", content=body, timeout=60)
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
