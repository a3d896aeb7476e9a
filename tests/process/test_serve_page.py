"""The page at /, in a real browser: figures move, and its playground writes what the API writes."""

import re
from collections.abc import Iterator

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
    eventually(lambda: re.search(r"24 tokens in .*, the first after", shown(page, "speed")))


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
    eventually(lambda: shown(page, "go") == "Write")
    wanted = api.engine.generate(f"{PROMPT}\n{said}\nand then?", adapter="python", max_tokens=24, temperature=0.0).text
    texts = page.run("[...document.querySelectorAll('.said .text')].map(each => each.textContent)")
    assert texts == [PROMPT, said, "and then?", wanted]


def test_what_the_server_refuses_is_said(page: Browser) -> None:
    page.run("document.getElementById('most').value = '100000'")
    page.run("document.getElementById('prompt').value = 'x'")
    page.run("document.getElementById('go').click()")
    eventually(lambda: "shorten the prompt" in shown(page, "speed"))
    errors = page.errors()  # the browser itself tells of the status
    assert all("400" in error for error in errors)


def test_the_plots_are_alive(api: Api, page: Browser) -> None:
    write(page, "complete", "whisper")
    points = "document.querySelector('#rate .line').getAttribute('d')?.split('L').length ?? 0"
    eventually(lambda: page.run(points) > 2)
    eventually(lambda: page.run("document.querySelectorAll('.plot .line[d]').length") == 4)
    written = api.engine.figures().generated_tokens
    eventually(lambda: f"{written} written" in page.run("document.querySelector('.plots').innerText"))
    assert {"python", "shout", "whisper"} <= set(page.run("[...document.querySelectorAll('#adapters b')].map(e => e.textContent)"))  # fmt: skip


def test_it_needs_no_other_host(api: Api, page: Browser) -> None:
    asked = page.run("performance.getEntriesByType('resource').map(each => each.name)")
    assert asked and all(each.startswith(api.url) for each in asked)


def test_who_likes_it_dark_gets_it_dark(api: Api, page: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser("--blink-settings=preferredColorScheme=0") as dark:
        dark.open(api.url)
        found = [sum(map(int, re.findall(r"\d+", each.run(ground)))) for each in (page, dark)]
    assert found[0] > 600 and found[1] < 150
