"""A page in headless Chromium, by the WebDriver protocol: Debian's packages chromium and chromium-driver."""

import base64
import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 60.0
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,1000"]


def is_installed() -> bool:
    return all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Browser:
    """One window."""

    def __init__(self, driver: str, *flags: str) -> None:
        self._client = httpx.Client(base_url=driver, timeout=WAIT_S, verify=False)
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": [*FLAGS, *flags]}, "goog:loggingPrefs": {"browser": "ALL"}}  # fmt: skip
        self._session = f"/session/{self._ask('POST', '/session', capabilities={'alwaysMatch': wanted})['sessionId']}"

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        answer = self._client.request(method, path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", url=url)

    def run(self, script: str) -> Any:
        """Return what JavaScript makes of this expression."""
        return self._ask("POST", f"{self._session}/execute/sync", script=f"return {script}", args=[])

    def resize(self, width: int, height: int) -> None:
        """Show what a screen of this size shows; a phone's, below 500 pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._ask("POST", f"{self._session}/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)

    def errors(self) -> list[str]:
        """Return what the page has complained of since the last time."""
        told = self._ask("POST", f"{self._session}/se/log", type="browser")
        return [each["message"] for each in told if each["level"] == "SEVERE"]

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", self._session)
        self._client.close()


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[Browser]:
    """Run a driver with one window."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )  # noqa: S607
    assert driver.stdout
    try:
        port = next(
            found[1] for line in driver.stdout if (found := re.search(r"on port (\d+)", line)) and found[1] != "0"
        )
        with contextlib.closing(Browser(f"http://127.0.0.1:{port}", *flags)) as window:
            yield window
    finally:
        driver.terminate()
        driver.wait(WAIT_S)
        driver.stdout.close()
