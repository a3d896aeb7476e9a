"""A server behind nginx, as deploy/nginx.conf sets it up: TLS, tokens as they come, and what is not for everybody."""

import contextlib
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ranks import free_port
from tests.serving_api import demo_api, eventually

CONF = Path(__file__).parents[2] / "deploy/nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = pytest.mark.skipif(
    not (NGINX and shutil.which("openssl")), reason="the Debian packages nginx and openssl are not here"
)


@contextlib.contextmanager
def proxy(folder: Path, upstream: str, port: int) -> Iterator[None]:
    """Run nginx with the recipe, in this folder, before a server at `upstream`."""
    pem, key = folder / "site.pem", folder / "site.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(pem)], check=True, capture_output=True)
    site = CONF.read_text()
    for name, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"), ("/etc/ssl/certs/llm.example.org.pem", str(pem)), ("127.0.0.1:8000;", f"{upstream};"),
        ("/etc/ssl/private/llm.example.org.key", str(key)), ("server_name llm.example.org", "server_name localhost"),
    ):  # fmt: skip
        assert name in site
        site = site.replace(name, here)
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {temporary} {site} }}"
    )
    with (folder / "errors").open("w") as errors:
        nginx = subprocess.Popen(
            [str(NGINX), "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=errors
        )
    try:
        yield
    finally:
        nginx.terminate()
        nginx.wait(20)


def is_up(web: httpx.Client) -> bool:
    try:
        return web.get("/version").status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_behind_the_proxy_of_the_recipe(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    with demo_api() as api, proxy(tmp_path, api.url.removeprefix("http://"), port):
        trusted = ssl.create_default_context(cafile=str(tmp_path / "site.pem"))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, timeout=60) as web:
            eventually(lambda: is_up(web))
            for path in ("/metrics", "/health", "/cluster"):
                assert web.get(path).status_code == 404
            asked = {"model": "demo", "prompt": "def ", "max_tokens": 200, "stream": True, "ignore_eos": True}
            came = list[float]()
            with web.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        came.append(time.monotonic())
            assert len(came) > 20 and came[-1] - came[0] > 0.02, "they came one after the other"
            large = web.post("/v1/completions", json={**asked, "prompt": "x" * (17 << 20)})
            assert large.status_code == 413
            sent = web.put("/v1/adapters/large", content=bytes(17 << 20))
            assert sent.status_code == 400 and "safetensors" in sent.text, "it has come to the server"
