"""What is told of requests: an id in every answer and line, who was refused and why, and figures by labels that stay few."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from symbiosis.base.logs import TextFormatter
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.cluster.router.server_registry import Seen, ServerRegistry
from symbiosis.protocol.cluster_state import Member, Told
from symbiosis.server.api_errors import KINDS, REASONS, ApiError
from symbiosis.server.api_keys import Keys
from symbiosis.server.labelled_figures import MOST, MOST_KNOWN, OTHER, Labelled
from symbiosis.server.observer import Observer
from symbiosis.server.request_record import RequestRecord
from tests.secret_files import write_secret
from tests.unit.test_cluster_view import view_of
from tests.waits import until

KEY = "eves-own-secret-key"


def front(folder: Path) -> RouterState:
    """A front end whose only server takes nothing yet."""
    (folder / "keys").write_text(f"eve {KEY} requests=1\nroot roots-own-secret-key admin\n")
    (folder / "keys").chmod(0o600)
    view = ServerRegistry("none", {})
    member = Member(name="m-server-1", kind="server", model="m", number=1, batch=8, share=4, most=4096)
    view.told, view.seen = Told(name="none", url="", members=(member,)), {1: Seen(member)}
    made = RouterState(view, str(folder / "keys"))
    made.observer = Observer(every_s=0.1)
    return made


def http(front: RouterState) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(front)), base_url="http://127.0.0.1")


async def figures(web: httpx.AsyncClient, name: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families((await web.get("/metrics")).text)
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def by_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request refused"]


@pytest.mark.parametrize(
    ("method", "path", "key", "body", "status", "reason", "tenant"),
    [
        ("GET", "/v1/models", "", b"", 401, "no_key", "unauthenticated"),
        ("GET", "/v1/models", "another", b"", 401, "unknown_key", "unauthenticated"),
        ("PUT", "/v1/adapters/x", KEY, b"", 403, "not_administrator", "eve"),
        ("GET", "/v1/models/none-such", KEY, b"", 404, "no_such_model", "eve"),
        ("GET", "/v1/nothing", KEY, b"", 404, "no_such_path", "eve"),
        ("GET", "/v1/nothing", "another", b"", 404, "no_such_path", "unauthenticated"),
        ("PATCH", "/v1/models", KEY, b"", 405, "no_such_method", "eve"),
        ("PATCH", "/v1/models", "", b"", 405, "no_such_method", "unauthenticated"),
        ("POST", "/v1/completions", KEY, b"x" * ((16 << 20) + 1), 413, "body_too_large", "eve"),
        ("POST", "/v1/completions", KEY, b"{", 400, "invalid_request", "eve"),
        ("POST", "/v1/completions", KEY, b'{"model": "m", "prompt": "a", "n": 2}', 400, "invalid_request", "eve"),
    ],
)
def test_a_refusal_is_told_and_counted_with_its_reason_and_by_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, path: str, key: str, body: bytes, status: int, reason: str, tenant: str
) -> None:  # fmt: skip
    async def ask() -> None:
        async with http(front(tmp_path)) as web:
            headers = {"X-Request-Id": "mine-1", **(by_key(key) if key else {})}
            answer = await web.request(method, path, headers=headers, content=body)
            assert answer.status_code == status and answer.headers["x-request-id"] == "mine-1"
            counted = await figures(web, "symbiosis_cluster_refused_requests_total")
            assert counted == {(reason, str(status), tenant): 1}
            answered = await figures(web, "symbiosis_cluster_http_requests_total")
            assert sum(count for (_, code), count in answered.items() if code == str(status)) == 1

    asyncio.run(ask())
    (line,) = told(caplog)
    named = {name: line[name] for name in ("request", "reason", "status", "tenant")}
    assert named == {"request": "mine-1", "reason": reason, "status": status, "tenant": tenant}
    assert not key or key not in "".join(map(TextFormatter().format, caplog.records))


def test_a_key_that_asks_too_much_is_told_of_by_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        made = front(tmp_path)
        async with http(made) as web:
            body = {"model": "m", "prompt": "a"}
            first = asyncio.create_task(web.post("/v1/completions", json=body, headers=by_key(KEY)))
            await until(lambda: made.keys.tenant(f"Bearer {KEY}").under_way)
            assert (await web.post("/v1/completions", json=body, headers=by_key(KEY))).status_code == 429
            first.cancel()
            counted = await figures(web, "symbiosis_cluster_refused_requests_total")
            assert counted == {("requests_of_key", "429", "eve"): 1}

    asyncio.run(ask())
    assert [line["reason"] for line in told(caplog)] == ["requests_of_key"]


def test_a_key_that_has_had_its_day_is_told_so_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the answer, in the log, and in the figures, where those who pay see it coming. Without a limit there is no figure."""

    async def ask() -> None:
        made = front(tmp_path)
        write_secret(tmp_path / "keys", f"eve {KEY} tokens_per_day=50\nroot roots-own-secret-key admin\n")
        made.keys = Keys(tmp_path / "keys", today=lambda: 18 * 3600.0)
        made.keys.tenant(f"Bearer {KEY}").admit(1, 0.0, 90).end(used=70)
        async with http(made) as web:
            await web.get("/v1/models/none-such", headers=by_key("roots-own-secret-key"))
            answer = await web.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=by_key(KEY))
            assert answer.status_code == 429 and answer.headers["retry-after"] == str(6 * 3600)
            message = "this key may have 50 tokens a day, and has had 70 since midnight UTC"
            assert answer.json()["error"]["message"] == message
            counted = await figures(web, "symbiosis_cluster_refused_requests_total")
            assert counted["daily_tokens_of_key", "429", "eve"] == 1
            assert await figures(web, "symbiosis_cluster_tenant_tokens_today") == {("eve",): 70}
            assert await figures(web, "symbiosis_cluster_tenant_tokens_per_day") == {("eve",): 50}

    asyncio.run(ask())
    line = next(line for line in told(caplog) if line["tenant"] == "eve")
    assert line["reason"] == "daily_tokens_of_key" and "50 tokens a day" in line["why"]


def test_a_flood_is_counted_in_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with http(front(tmp_path)) as web:
            for _ in range(300):
                await web.get("/v1/models", headers={"Authorization": "Bearer wrong"})
            await web.get("/v1/models/none-such", headers=by_key(KEY))  # of another kind, which the flood does not hide
            await until(lambda: sum(line.get("times", 1) for line in told(caplog)) >= 301)
            counted = await figures(web, "symbiosis_cluster_refused_requests_total")
            assert counted["unknown_key", "401", "unauthenticated"] == 300

    begun = asyncio.new_event_loop().time()
    asyncio.run(ask())
    lines = told(caplog)
    of_flood = [line for line in lines if line["reason"] == "unknown_key"]
    assert sum(line.get("times", 1) for line in of_flood) == 300
    assert len(of_flood) <= 2 + (asyncio.new_event_loop().time() - begun) / 0.1
    assert [line["tenant"] for line in lines if line["reason"] == "no_such_model"] == ["eve"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "-x", "é", 'a"b', "a;b", "a\tb"])
def test_an_id_that_is_none_is_replaced(tmp_path: Path, given: str) -> None:
    async def ask() -> str:
        async with http(front(tmp_path)) as web:
            headers = {"X-Request-Id": given.encode("latin-1")}
            return (await web.get("/health", headers=headers)).headers["x-request-id"]

    assert re.fullmatch("[0-9a-f]{32}", asyncio.run(ask()))


def test_what_fails_says_which_request_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the answer, in the line of the error itself, and in that of the refusal."""
    broken = front(tmp_path)
    broken.view.look = lambda: logging.getLogger("symbiosis").error("about to fail") or 1 / 0  # type: ignore[method-assign]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(broken), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as web:
            headers = {"X-Request-Id": "mine-2", **by_key(KEY)}
            return await web.get("/v1/models", headers=headers)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(TextFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger("symbiosis").addHandler(handler)
    try:
        answer = asyncio.run(ask())
    finally:
        logging.getLogger("symbiosis").removeHandler(handler)
    assert answer.status_code == 500 and "mine-2" in answer.json()["error"]["message"]
    assert len(lines) == 2 and all("mine-2" in line for line in lines)


def test_every_status_has_a_reason() -> None:
    assert set(KINDS) <= set(REASONS)
    assert {ApiError(status, "").reason for status in range(400, 600) if status not in REASONS and _is_status(status)} == {"other"}  # fmt: skip


def _is_status(number: int) -> bool:
    return number in {status.value for status in __import__("http").HTTPStatus}


@given(st.lists(st.integers(0, 200), max_size=600))
def test_labels_stay_few_and_nothing_is_counted_twice(names: list[int]) -> None:
    labelled: Labelled[list[int]] = Labelled(list, pinned={("0",)})
    for name in names:
        labelled.shown[labelled.label((str(name),))].append(name)
        assert len(labelled.named) <= MOST and len(labelled.shown) <= MOST + 2
    for (label,), counted in labelled.shown.items():
        assert label == OTHER or {str(each) for each in counted} == {label}


def test_a_label_that_is_used_most_gets_series_of_its_own_however_late_it_comes() -> None:
    now = [0.0]
    labelled: Labelled[list[str]] = Labelled(list, clock=lambda: now[0])
    for name in [str(n) for n in range(MOST)] * 10 + ["late"] * 30:
        labelled.shown[labelled.label((name,))].append(name)
    assert len(labelled.shown["late",]) == 11 and len(labelled.shown[OTHER,]) == 19
    now[0] = 10_000.0
    for number in range(3 * MOST_KNOWN):
        labelled.label((f"new-{number}",))
    assert len(labelled._used) <= MOST_KNOWN + 1 and len(labelled.named) == MOST
    labelled.drop(("new-1",))
    labelled.drop(("never",))


def test_series_of_an_adapter_go_with_it(tmp_path: Path) -> None:
    """A front end finds adapters in the folder of their model."""
    one = RouterState(view_of(), None)
    one.view.told = Told(name="none", url="", members=(Member(name="a", kind="server", model="m"), Member(name="b", kind="server", model="other")), adapters={"m": str(tmp_path)})  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")

    async def ask() -> None:
        async with http(one) as web:
            record = RequestRecord(tenant="", model="m", adapter="mine", is_whole=True)
            record.tokens(3)
            one.observer.end(record, "/v1/completions")
            name = "symbiosis_cluster_adapter_time_to_first_token_seconds_count"
            assert await figures(web, name) == {("mine", "m"): 1}  # adapter, model
            (tmp_path / "mine" / "adapter_config.json").unlink()
            assert not await figures(web, name)
            assert await figures(web, name.replace("adapter", "tenant")) == {("",): 1}

    asyncio.run(ask())
