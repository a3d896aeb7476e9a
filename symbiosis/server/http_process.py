"""The process that speaks HTTP. It is started with two sockets: one that listens, and the link to the engine's process."""

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

import msgspec
import uvicorn

from symbiosis.base.logs import name_process, set_up_logging
from symbiosis.base.memory import look_at_what_is_new, look_seldom
from symbiosis.base.pulse import BEAT_S, SILENT_S
from symbiosis.base.threads import take_turns_often
from symbiosis.server import tracing
from symbiosis.server.connections import server_of
from symbiosis.server.ipc.engine_client import EngineClient
from symbiosis.server.ipc.engine_ipc import FrontOptions, Started
from symbiosis.server.openai_api import make_app
from symbiosis.server.serving_state import ServingState

logger = logging.getLogger("symbiosis")

LAST_WORDS_S = 5.0  # for answers under way when the engine has ended


def tokenizer_of(options: FrontOptions) -> Any:
    """The model's, with the chat template that the server was given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    tokenizer.chat_template = options.chat_template or tokenizer.chat_template
    return tokenizer


async def serve(listener: socket.socket, link: socket.socket, options: FrontOptions) -> None:
    """Serve until the engine hangs up, or until it says that it ends and everything is answered."""
    tokenizer = tokenizer_of(options)
    remote = await EngineClient.connect(link)
    front = ServingState(remote, tokenizer, options, tracing.opened("symbiosis-serve"))
    server = server_of(make_app(front), front.observer, [listener], LAST_WORDS_S)
    look_at_what_is_new()
    tasks = [asyncio.create_task(_end(server, remote)), asyncio.create_task(_watch(remote, options.engine))]
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    remote.close()


async def _watch(remote: EngineClient, engine: int) -> None:
    """End the engine's process if it hangs, and with it the whole server, because a hanging process can neither answer nor end by
    itself."""
    while remote.beat() or not engine:
        await asyncio.sleep(BEAT_S / 2)
    if remote.is_there:
        logger.critical("the engine's process (%d) has said nothing for %g s: the server ends", engine, SILENT_S)
        os.kill(engine, signal.SIGKILL)


async def _end(server: uvicorn.Server, remote: EngineClient) -> None:
    drained = asyncio.create_task(remote.drained.wait())
    await asyncio.wait([drained, remote.ended], return_when=asyncio.FIRST_COMPLETED)
    while remote.is_there and remote.requests:
        await asyncio.sleep(0.02)
    server.should_exit = True


def do_without_torch() -> None:
    """Let transformers find no torch, which it would import: tokenizers work without it, and it takes two seconds and 240 MB."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is none
    sys.modules["torch"] = None  # type: ignore[assignment]  # with None there, importing it fails and looking for it finds nothing


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the engine's process says when it is over
        signal.signal(number, signal.SIG_IGN)
    started = msgspec.json.decode(sys.argv[1], type=Started)
    look_seldom()
    take_turns_often()
    do_without_torch()
    name_process("http")
    set_up_logging(started.options.log_format)
    for descriptor in (started.listener, started.link):
        os.set_inheritable(descriptor, False)
    try:
        asyncio.run(serve(socket.socket(fileno=started.listener), socket.socket(fileno=started.link), started.options))
    except EOFError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
