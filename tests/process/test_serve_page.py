"""The page at /, in a real browser: figures move, and its playground writes what the API writes."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, browser, is_installed
from tests.serving_api import Api, demo_api, eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not is_installed(), reason="needs Debian's chromium and chromium-driver: make test-browser"),
]
PROMPT = "def average(numbers):"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with demo_api() as api:
        yield api


@pytest.fixture(scope="module")
def page(api: Api) -> Iterator[Browser]:
    with browser() as page:
        page.open(api.url)
        eventually(lambda: shown(page, "state") == "serving")
        yield page
        assert page.errors() == []


def shown(page: Browser, id: str) -> str:
    return str(page.run(f"document.getElementById('{id}').textContent"))


def write(page: Browser, kind: str, model: str, prompt: str = PROMPT) -> None:
    page.run(f"document.getElementById('{kind}').click()")
    values = {"prompt": prompt, "name": model, "most": "24", "heat": "0"}
    for id, value in values.items():
        page.run(f"document.getElementById('{id}').value = {value!r}")
    page.run("document.getElementById('go').click()")
    eventually(lambda: re.search(r"24 output tokens in .*, the first after", shown(page, "speed")))


@pytest.mark.parametrize("model", ["demo", "shout"])
def test_the_playground_goes_on_with_a_text(api: Api, page: Browser, model: str) -> None:
    write(page, "complete", model)
    wanted = api.engine.generate(PROMPT, adapter=None if model == "demo" else model, max_tokens=24, temperature=0.0)
    assert page.run("document.querySelector('#texts .text').textContent") == PROMPT + wanted.text


def test_the_playground_chats(api: Api, page: Browser) -> None:
    write(page, "chat", "python")
    said = api.engine.generate(PROMPT, adapter="python", max_tokens=24, temperature=0.0).text
    page.run("document.getElementById('prompt').value = 'and then?'")
    page.run("document.getElementById('go').click()")
    eventually(lambda: page.run("document.querySelectorAll('.said').length") == 4)
    eventually(lambda: shown(page, "go") == "Send")
    wanted = api.engine.generate(f"{PROMPT}\n{said}\nand then?", adapter="python", max_tokens=24, temperature=0.0).text
    texts = page.run("[...document.querySelectorAll('.said .text')].map(each => each.textContent)")
    assert texts == [PROMPT, said, "and then?", wanted]


def test_what_the_server_refuses_is_said(page: Browser) -> None:
    page.run("document.getElementById('most').value = '100000'")
    page.run("document.getElementById('prompt').value = 'x'")
    page.run("document.getElementById('go').click()")
    eventually(lambda: "reduce the length of the input prompt" in shown(page, "speed"))
    errors = page.errors()  # the browser itself tells of the status
    assert all("400" in error for error in errors)


def test_the_plots_are_alive(api: Api, page: Browser) -> None:
    write(page, "complete", "whisper")
    points = "document.querySelector('#rate .line').getAttribute('d')?.split('L').length ?? 0"
    eventually(lambda: page.run(points) > 2)
    eventually(lambda: page.run("document.querySelectorAll('.plot .line[d]').length") == 4)
    written = api.engine.figures().generated_tokens
    eventually(lambda: f"{written} output tokens" in page.run("document.querySelector('.plots').innerText"))
    assert {"python", "shout", "whisper"} <= set(page.run("[...document.querySelectorAll('#adapters b')].map(e => e.textContent)"))  # fmt: skip


def test_a_request_that_has_no_token_says_why(api: Api, page: Browser) -> None:
    """While it waits, and while its prompt is read: the engine is held before its next step, and then within it."""
    held = [threading.Event(), threading.Event()]
    gives_way = api.engine._served.gives_way
    api.engine._served.gives_way = lambda step: not held[1].wait(60)
    api.engine._loop.ask(lambda: held[0].wait(60))  # type: ignore[func-returns-value]
    try:
        page.run("document.getElementById('complete').click()")
        page.run("document.getElementById('most').value = '24'")
        page.run("document.getElementById('go').click()")
        for event, stage in zip(held, ("Waiting for its turn", "Reading the prompt"), strict=True):
            eventually(lambda stage=stage: shown(page, "speed").startswith(stage))  # type: ignore[misc]
            assert shown(page, "go") == "Stop" and page.run("document.getElementById('speed').className") == "busy"
            event.set()
        eventually(lambda: "24 output tokens" in shown(page, "speed"))
        assert page.run("document.getElementById('speed').className") == ""
    finally:
        for event in held:
            event.set()
        api.engine._served.gives_way = gives_way


def test_the_example_is_what_the_model_writes(page: Browser) -> None:
    """The demo model has seen Python only. A chat, and any other text, have examples of their own."""
    page.run("location.reload()")
    eventually(lambda: shown(page, "state") == "serving")
    value = "document.getElementById('prompt').value"
    pressed = "document.querySelector('.kinds [aria-pressed=true]').id"
    assert page.run(value).startswith("def ") and page.run(pressed) == "complete"
    for kind, chat in (("chat", True), ("chat", False), ("text", False)):
        page.run(f"(kind = '{kind}', mode({str(chat).lower()}), 0)")
        assert page.run(value) and not page.run(value).startswith("def ")
    page.run("(document.getElementById('prompt').value = 'my own', mode(true), 0)")
    assert page.run(value) == "my own"
    page.run("(kind = 'code', mode(false), 0)")


BOXES = """(() => {
  const box = id => document.getElementById(id).getBoundingClientRect().toJSON();
  return Object.fromEntries(['play', 'texts', 'speed', 'prompt', 'go', 'adapters', 'figures'].map(id => [id, box(id)]));
})()"""
WIDE = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
CUT = "[...document.querySelectorAll('button, label, h1, h2, h3, b, span, select')].filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline').map(e => e.outerHTML.slice(0, 80))"
SMALL = "[...document.querySelectorAll('button, input, select, textarea')].filter(e => e.offsetParent && e.getBoundingClientRect().height < 40).map(e => e.id)"
NAMELESS = """[...document.querySelectorAll('button, input, select, textarea, svg[role], form, section, [role=group], [role=log]')].filter(e =>
  e.offsetParent !== null && !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.labels?.[0]?.innerText.trim() || e.innerText?.trim())).map(e => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize(("width", "height"), [(1280, 1000), (390, 844)])
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_the_page_fits_a_desk_and_a_phone(api: Api, width: int, height: int, scheme: int, tmp_path: Path) -> None:
    with browser(f"--blink-settings=preferredColorScheme={scheme}") as page:
        page.resize(width, height)
        page.open(api.url)
        eventually(lambda: shown(page, "state") == "serving")
        write(page, "chat", "python", "x" * 400)
        page.run("scrollTo(0, 0)")
        page.picture(tmp_path / f"{width}.png")
        boxes = page.run(BOXES)
        assert page.run("document.documentElement.scrollWidth") == width
        assert page.run(WIDE) == [] and page.run(CUT) == [] and page.run(SMALL) == [] and page.run(NAMELESS) == []
        assert boxes["play"]["top"] <= boxes["adapters"]["top"] < boxes["figures"]["top"]
        order = [boxes[id]["top"] for id in ("play", "texts", "speed", "prompt", "go")]
        assert order == sorted(order) and boxes["speed"]["bottom"] < height, "what becomes of a request is in sight"
        if width < 500:
            assert boxes["play"]["width"] > 0.9 * width and boxes["adapters"]["top"] > boxes["play"]["bottom"]
            assert float(page.run("parseFloat(getComputedStyle(document.getElementById('prompt')).fontSize)")) >= 16
        else:
            assert boxes["adapters"]["left"] > boxes["play"]["right"] > width / 2
            assert boxes["figures"]["bottom"] < height
        assert page.errors() == []


def test_it_needs_no_other_host(api: Api, page: Browser) -> None:
    asked = page.run("performance.getEntriesByType('resource').map(each => each.name)")
    assert asked and all(each.startswith(api.url) for each in asked)


def test_who_likes_it_dark_gets_it_dark(api: Api, page: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser("--blink-settings=preferredColorScheme=0") as dark:
        dark.open(api.url)
        found = [sum(map(int, re.findall(r"\d+", each.run(ground)))) for each in (page, dark)]
    assert found[0] > 600 and found[1] < 150
