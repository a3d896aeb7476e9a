"""A disk that is full: whoever sends an adapter is told so, with 507 and which folder it is, and nothing is left or changed."""

import asyncio
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from starlette.types import ASGIApp

from symbiosis.cluster.placement import State
from symbiosis.cluster.router import adapter_uploads
from symbiosis.cluster.router.app import make_app
from symbiosis.cluster.router.router_state import RouterState
from symbiosis.protocol.cluster_state import Member
from symbiosis.server.api_errors import ApiError
from symbiosis.server.ipc.engine_ipc import AdapterInfo, EngineReady, FrontOptions
from symbiosis.server.openai_api import make_app as make_server
from symbiosis.server.serving_state import ServingState
from tests.unit.test_cluster_listed import front as front
from tests.unit.test_cluster_listed import tell_of
from tests.unit.test_serving_detokenize import bytes_tokenizer

ROOM = 64 << 10  # bytes
METADATA = {"adapter_config": json.dumps({"peft_type": "LORA"})}


@contextmanager
def little_room(folder: Path) -> Iterator[None]:
    """Let a folder be a file system with room for so much; without the right to that, let no file be larger."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    if os.getuid() == 0 and not subprocess.run(mount, capture_output=True).returncode:
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def adapter(numbers: int) -> bytes:
    return safetensors.torch.save({"a": torch.zeros(numbers)}, METADATA)


def put(app: ASGIApp, path: str, body: bytes) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.put(path, content=body)

    return asyncio.run(send())


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


def test_a_server_says_that_its_folder_for_adapters_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def add(kind: type, method: str, name: str, file: str) -> AdapterInfo:
        return AdapterInfo(name=name, bytes=Path(file).stat().st_size)

    welcome = EngineReady(model="demo", longest=64, most_tokens=64, vocabulary=8)
    remote: Any = SimpleNamespace(welcome=welcome, places=None, ask=add)
    uploads = tmp_path / "uploads"
    with little_room(uploads):
        options = FrontOptions(model="demo", folder="", uploads=str(uploads))
        app = make_server(ServingState(remote, bytes_tokenizer(), options))
        answer = put(app, "/v1/adapters/mine", adapter(1 << 20))
        told = answer.json()["error"]["message"]
        assert answer.status_code == 507 and answer.headers["x-should-retry"] == "false"
        assert "folder for adapters that are sent is full" in told and str(tmp_path) not in told
        assert str(uploads) in caplog.text and not files(uploads)
        assert put(app, "/v1/adapters/mine", adapter(16)).json()["bytes"] > 64


@pytest.mark.parametrize("model", ["one", "two"])
def test_a_cluster_says_of_which_model_the_folder_is_full(
    front: RouterState, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loads(*_: Any) -> None: ...

    monkeypatch.setattr(adapter_uploads, "_try", loads)
    tell_of(tmp_path, "one", "two")
    with little_room(folder := tmp_path / model):
        answer = put(make_app(front), f"/v1/adapters/mine?model={model}", adapter(1 << 20))
        assert answer.status_code == 507 and f"the folder of {model}'s adapters is full" in answer.text
        assert str(tmp_path) not in answer.text and not list((folder / adapter_uploads.SENT).iterdir())
        assert put(make_app(front), f"/v1/adapters/mine?model={model}", adapter(16)).status_code == 200
        assert (folder / "mine" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("said", "told"), [(400, 400), (500, 400), (403, 403), (429, 429), (503, 503)])
def test_only_an_adapters_own_fault_is_its_senders(said: int, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server that tries it answers for other reasons stays what it is."""

    class Answer:
        status = said

        async def head(self) -> None: ...
        def lose(self, why: str) -> None: ...
        async def whole(self) -> bytes:
            return b'{"error": {"message": "why"}}'

    async def answered(*_: Any) -> Answer:
        return Answer()

    monkeypatch.setattr(adapter_uploads.Upstream, "ask", answered)
    member = Member(name="one-server-1", kind="server", model="one", url="http://127.0.0.1:1")
    view: Any = SimpleNamespace(seen={1: SimpleNamespace(member=member, state=State.READY)})
    with pytest.raises(ApiError, match="why") as error:
        asyncio.run(adapter_uploads._try(view, "one", "mine", {}))
    assert error.value.status == told
