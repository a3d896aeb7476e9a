"""Adapters that are sent to a cluster: they go into the folder of their model, from which all its servers read."""

import asyncio
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import msgspec

from symbiosis.cluster.placement import State
from symbiosis.cluster.router.server_registry import ServerRegistry
from symbiosis.cluster.router.upstream import Lost, Upstream, message_of
from symbiosis.protocol.cluster_state import Told
from symbiosis.server.api_errors import ApiError, wrong

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,99}")
MOST_BYTES = 1 << 30
SENT = ".sent"  # in the folder: what was sent. A link with the adapter's name leads there, so that it is replaced in one go
FOLDER = "the folder of {}'s adapters"
PACKAGE = Path(__file__).parents[2]


def check_new(told: Told, model: str | None, name: str) -> None:
    """Raise `ApiError` if no new adapter can have this name, or if its model retires."""
    if name in told.names:
        raise wrong(f"{name!r} is the name of a model: choose another", "lora_name")
    if model in told.retiring:
        raise _no_model(f"{model} retires, and takes no new adapters: train one for the model that comes after it")


def folder_for(view: ServerRegistry, model: str | None, name: str) -> Path:
    """Return the folder of a model's adapters, in which one may have this name. Raises `ApiError` if there is none."""
    if not NAME.fullmatch(name):
        raise wrong(f"an adapter cannot be named {name[:200]!r}", "lora_name")
    models = view.told.models
    if model is None and len(models) != 1:
        raise wrong(f"say of which model it is, by ?model=: {', '.join(models)}", "model")
    if model is not None and model not in (*models, *view.told.retiring):
        raise _no_model(f"no model {model[:100]!r} has adapters here: {', '.join(models)} may have")
    folder = view.told.adapters.get(model or models[0])
    if folder is None or Path(folder).is_relative_to(PACKAGE):
        raise wrong(f"{model or models[0]} has no folder for adapters: `adapters:` in the cluster's file names one")
    return Path(folder)


def _no_model(message: str) -> ApiError:
    return ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found", reason="no_such_model")


def new_folder(folder: Path) -> Path:
    made = folder / SENT / uuid.uuid4().hex
    made.mkdir(parents=True)
    return made


async def install(
    view: ServerRegistry, model: str, folder: Path, name: str, sent: Path, headers: dict[str, str]
) -> None:
    """Let an adapter that lies in `sent` have this name, once a server has been able to load it."""
    trial = f"{name}@{sent.name[:8]}"
    (folder / trial).symlink_to(sent.relative_to(folder))
    try:
        await _try(view, model, trial, headers)
        await asyncio.to_thread(_replace, folder, name, folder / trial)
    finally:
        (folder / trial).unlink(missing_ok=True)


async def _try(view: ServerRegistry, model: str, name: str, headers: dict[str, str]) -> None:
    """Have a server make a token with it."""
    body = msgspec.json.encode({"model": name, "prompt": [0], "max_tokens": 1})
    for seen in view.seen.values():
        if seen.member.model == model and seen.state is State.READY:
            with suppress(Lost):
                status, told = await Upstream.fetch(seen.member.url, "/v1/completions", headers, body, "POST")
                if status in (400, 500):  # the adapter is at fault
                    raise wrong(message_of(told))
                if status != 200:
                    raise ApiError(status, message_of(told))
                return
    raise ApiError(503, f"no server of {model} is ready to try it: send it later", retry_s=5.0, reason="no_server")


def _replace(folder: Path, name: str, link: Path) -> None:
    """Put a link in the place of what has this name now, and remove that."""
    old = _taken_away(folder, name)
    link.replace(folder / name)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path, name: str) -> bool:
    """Remove an adapter from the folder. Return whether it was there."""
    there = folder / name
    is_link = there.is_symlink()
    if not is_link and not there.is_dir():
        return False
    old = _taken_away(folder, name)
    if is_link:
        there.unlink(missing_ok=True)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return True


def _taken_away(folder: Path, name: str) -> Path | None:
    """Return the files that go with this name. A folder that somebody has put there is moved aside. A link stays until it is replaced, and only
    what was sent under this name goes with it: what else it leads to is somebody's own, or another adapter."""
    there = folder / name
    if there.is_symlink():
        sent = there.readlink()
        is_alone = sum(each == folder / sent for each in _linked(folder)) == 1
        return folder / sent if sent.parent == Path(SENT) and is_alone else None
    if not there.is_dir():
        return None
    aside = new_folder(folder)
    return there.rename(aside / name).parent


def _linked(folder: Path) -> Iterator[Path]:
    """Yield where each link of a folder leads, by one step."""
    for each in folder.iterdir():
        with suppress(OSError):  # it is no link, or is gone
            yield folder / each.readlink()
