"""The engine's process: it starts the other two, starts them again when they die, and drains when it is told to end."""

import json
import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from symbiosis.base import procs
from symbiosis.base.folders import Use, process_folder
from symbiosis.base.logs import name_process, set_up_logging
from symbiosis.base.memory import look_at_what_is_new
from symbiosis.base.pulse import SILENT_S
from symbiosis.base.threads import take_turns_often
from symbiosis.build import build
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.model.checkpoint import located, path_of
from symbiosis.protocol.endpoints import socket_path
from symbiosis.server.cors import Cors
from symbiosis.server.ipc.engine_ipc import EngineReady, FrontOptions, Started
from symbiosis.server.ipc.engine_server import EngineServer
from symbiosis.server.launch.preflight import chat_template, checkpoints_of, folder_of, named
from symbiosis.serving.request import PoolingKind
from symbiosis.serving.serve_options import ServeOptions, listed

if TYPE_CHECKING:
    from symbiosis.server.tinker.tinker_service import TrainingService
    from symbiosis.serving import Engine

logger = logging.getLogger("symbiosis")

LOOK_EVERY_S = 0.1
START_S = 600.0
END_S = 20.0  # for the engine, when nothing is under way any more
WITHIN_S = 60.0  # a process that dies so often in this time is given up
STOP_S = 10.0  # for the executor
QUIET_S = 5.0  # without a request, before a server whose cluster is gone ends
KIND = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layer", "n_head",
)  # fmt: skip
FIRST_LOOK_S, MOST_WARNED = 10.0, 20  # at the adapters of the folder
OPEN = (
    "anybody who can connect to %s may use this server, and load adapters: give --api-keys FILE, and encrypt what others can read "
    "(a proxy with TLS)"
)


class Ending(BaseException):
    """SIGTERM or SIGINT came. Like KeyboardInterrupt, it is no error of the model's for those who try whether it works."""


class KeepsDying(SymbiosisError):
    """A process dies again and again, and starting it once more would not help."""


class RestartingChild:
    """A process that is started again when it dies, unless that happens too often. What it prints when it is ready is not shown: this server
    has a line of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._child: procs.Child | None = None
        self._starts: deque[float] = deque(maxlen=procs.MOST_STARTS)

    def start(self, words: list[str], descriptors: tuple[int, ...] = ()) -> None:
        now = time.monotonic()
        if len(self._starts) == procs.MOST_STARTS and now - self._starts[0] < WITHIN_S:
            raise KeepsDying(f"{self.name} died {procs.MOST_STARTS} times within {WITHIN_S:g} s: see what it wrote")
        self._starts.append(now)
        self._child = procs.Child(words, descriptors=descriptors)

    @property
    def child(self) -> procs.Child:
        """The process that was started last."""
        assert self._child is not None
        return self._child

    @property
    def is_dead(self) -> bool:
        return self._child is not None and self._child.status is not None

    def stop(self) -> None:
        """Let it finish, if it was started."""
        if self._child is not None:
            self._child.stop(STOP_S)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


class ServeProcesses:
    """The processes of one `symbiosis serve`."""

    def __init__(self, options: ServeOptions, listener: socket.socket) -> None:
        self._options, self._listener = options, listener
        self._executor, self._http = RestartingChild("the executor"), RestartingChild("the HTTP process")
        self._told = threading.Event()  # to end
        self._link: EngineServer | None = None
        self._training: TrainingService | None = None
        self._ours: socket.socket | None = None
        self._worked = time.monotonic()  # when requests were last seen under way

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. A second signal does not wait for what is under way."""
        with ExitStack() as stack:
            procs.when_told_to_end(self._end, self._end_at_once)
            procs.while_needed(self._is_needed)
            self._folder = stack.enter_context(process_folder(Use.RUNTIME))
            self._uploads = stack.enter_context(process_folder(Use.TEMPORARY))
            stack.callback(self._http.kill)
            stack.callback(self._executor.stop)
            try:
                endpoint = self._options.executor or self._start_executor()
                self._start_http()  # while the engine is made ready
                engine = stack.enter_context(self._engine(endpoint))
                look_at_what_is_new()
                self._welcome(engine)
                self._await_http(endpoint, engine)
                self._say(endpoint)
                threading.Thread(target=self._look_at_adapters, args=[engine], name="serve-look", daemon=True).start()
                while not self._told.wait(LOOK_EVERY_S):
                    self._look(endpoint, engine)
                self._drain()
            except MemoryError:
                self._give_up("there is no memory left to serve anything")
            except Ending:
                logger.info("ended at once")

    def _end(self) -> None:
        if self._link is None:
            raise Ending
        self._told.set()

    def _end_at_once(self) -> None:
        raise Ending

    def _is_needed(self) -> bool:
        """Whether requests are under way, or were a moment ago: a front end that is ending itself may bring them back from another server."""
        if self._link is not None and self._link.under_way:
            self._worked = time.monotonic()
        return time.monotonic() - self._worked < QUIET_S

    def _start_executor(self) -> str:
        endpoint = f"local://{self._folder}/executor.sock"
        self._executor.start(executor_words(self._options, endpoint))
        return endpoint

    def _start_http(self) -> None:
        options = self._options
        for left in self._uploads.iterdir():
            left.unlink(missing_ok=True)
        self._ours, theirs = socket.socketpair()
        front = FrontOptions(
            model=model_name(options), folder=str(located(str(options.model))), api_keys=options.api_keys,
            adapters=str(folder) if (folder := folder_of(options)) else None, max_body_bytes=options.max_body_bytes,
            max_adapter_bytes=options.max_adapter_bytes, max_requests=options.max_requests,
            host=options.host, allowed_hosts=options.allowed_hosts, uploads=str(self._uploads), engine=os.getpid(), chat_template=chat_template(options),
            log_format=options.log_format, trains=options.train, predicts=options.predicts, server=options.server_name, tool_parser=options.tool_parser,
            pooling=options.pooling or pooling_of(located(str(options.model))), root_path=options.root_path or "",
            cors=Cors(
                listed(options.allowed_origins), listed(options.allowed_methods) or ("*",), listed(options.allowed_headers) or ("*",),
                options.allow_credentials,
            ),
        )  # fmt: skip
        with theirs:
            words = http_words(self._listener, theirs, front)
            self._http.start(words, (self._listener.fileno(), theirs.fileno()))

    @contextmanager
    def _engine(self, endpoint: str) -> Iterator["Engine"]:
        """Return the engine when it is ready, with the adapters that the options name."""
        from symbiosis.serving import Engine

        self._await_executor(endpoint)
        options = self._options
        with Engine(
            endpoint, located(str(options.model)), adapters=folder_of(options), max_batch=options.max_batch,
            adapters_in_batch=options.adapters_in_batch, memory=options.memory_size, policy=options.policy,
            first_token_s=options.first_token_s, prefill_tokens=options.prefill_tokens, max_waiting=options.max_requests,
            of_tenant=options.of_tenant, max_rank=options.max_rank, adapter_memory=options.adapter_memory_size,
            compiles=options.compile, wait=options.wait_s, max_adapter_bytes=options.max_adapter_bytes,
            name=model_name(options), devices=options.places, speculate=options.speculate, bitwise=options.bitwise,
        ) as engine:  # fmt: skip
            if options.executor is not None:
                must_be_the_model(engine.config, located(str(options.model)), options.executor)
            for name, path in named(options):
                engine.add(name, path)
            with self._trained(endpoint, engine):
                yield engine

    @contextmanager
    def _trained(self, endpoint: str, engine: "Engine") -> Iterator[None]:
        """Have the training service beside the engine, if the options say so."""
        if not self._options.train:
            yield
            return
        from symbiosis import training
        from symbiosis.server.tinker.tinker_service import ORDER_WAIT_S, ROOM_WAIT_S, TrainingService, runs_folder

        options = self._options
        state = runs_folder(checkpoints_of(options), options.server_name)
        with training.Engine(
            endpoint,
            wait=options.wait_s,
            state=state,
            order_wait=ORDER_WAIT_S,
            room_wait=ROOM_WAIT_S,
            bitwise=options.bitwise,
        ) as trainer:
            if options.bitwise:
                logger.info("bitwise: sampler and trainer agree on all of %d tokens", trainer.prove_bitwise(engine))
            tokenizer = (
                str(options.model)
                if options.model != "demo" and path_of(str(options.model)) is None
                else str(located(str(options.model)))
            )
            self._training = TrainingService(
                engine, trainer, checkpoints_of(options), model_name(options), tokenizer, options.server_name
            )
            try:
                yield
            finally:
                self._training.close()

    def _await_executor(self, endpoint: str) -> None:
        """Wait for the executor. If it is one of our own and cannot start, it has said why."""
        path, deadline = socket_path(endpoint), time.monotonic() + START_S
        while self._options.executor is None and not (path and path.is_socket()):
            if self._executor.is_dead:
                raise SymbiosisError("the executor could not start, as it says above")
            if time.monotonic() > deadline:
                raise SymbiosisError(f"the executor was not ready within {START_S:g} s")
            time.sleep(0.02)

    def _welcome(self, engine: "Engine") -> None:
        assert self._ours is not None
        welcome = EngineReady(
            model=model_name(self._options), longest=engine.longest, most_tokens=engine.most_tokens, vocabulary=engine.vocabulary,
            width=engine.width, ends=tuple(engine.ends), fingerprint=engine.fingerprint, secret=procs.heard, build=build(),
        )  # fmt: skip
        self._link = EngineServer(engine, self._ours, welcome, self._training.ask if self._training else None)

    def _await_http(self, endpoint: str, engine: "Engine") -> None:
        """Wait until the process that speaks HTTP listens, or until we are told to end."""
        while not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and not self._told.wait(0.02):
            self._look(endpoint, engine)

    def _say(self, endpoint: str) -> None:
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"serving {model_name(self._options)} at {url}/v1, executor at {endpoint}", flush=True)
        if not self._options.is_for_this_machine and self._options.api_keys is None:
            logger.warning(OPEN, url)

    def _look_at_adapters(self, engine: "Engine") -> None:
        """Log what is wrong in the folder of adapters, so that its owner learns of it before clients do."""
        ends = time.monotonic() + FIRST_LOOK_S
        looked = engine.look_at_adapters(lambda: self._told.is_set() or time.monotonic() > ends)
        for problem in list(looked.problems.values())[:MOST_WARNED]:
            logger.warning("%s", problem)
        if (more := len(looked.problems) - MOST_WARNED) > 0:
            logger.warning("%d more adapters cannot be served", more)
        if looked.left and not self._told.is_set():
            logger.info(
                "%d adapters of the folder were not looked at yet: they are when they are asked for", looked.left
            )

    def _look(self, endpoint: str, engine: "Engine") -> None:
        """Start again what has died."""
        if self._executor.is_dead:
            logger.error(
                "the executor died (status %d) and is started again; requests wait", self._executor.child.status
            )
            self._executor.start(executor_words(self._options, endpoint))
        assert self._link is not None
        if not engine.is_alive:
            self._give_up("the engine's thread has died")
        if engine.is_starved:
            self._give_up("there is no memory left to serve anything")
        if engine.has_lost_ranks:
            self._give_up("ranks die again and again")
        if engine.step_s > self._options.max_step_s:
            self._give_up(f"a step has taken longer than --max-step-s {self._options.max_step_s:g}: it hangs")
        if self._link.is_lost:
            logger.error("the HTTP process has said nothing for %g s and is killed", SILENT_S)
            self._http.kill()
        if self._http.is_dead:
            logger.error("the HTTP process died (status %d) and is started again", self._http.child.status)
            self._link.close()
            self._start_http()
            self._welcome(engine)

    def _give_up(self, reason: str) -> NoReturn:
        """End at once, because the engine's thread could keep an orderly end waiting for ever."""
        try:
            logger.critical("%s: the server ends", reason)
            self._http.kill()
            self._executor.stop()
            for folder in (self._folder, self._uploads):
                shutil.rmtree(folder, ignore_errors=True)
            logging.shutdown()
        finally:  # where there is no memory, any of these may fail
            os._exit(1)

    def _drain(self) -> None:
        assert self._link is not None
        logger.info(
            "finishing what is under way, for at most %g s (another ctrl-C or SIGTERM ends at once)",
            self._options.drain_s,
        )
        self._link.drain()
        if not self._http.child.wait(self._options.drain_s):
            logger.warning("not all requests were finished within %g s", self._options.drain_s)
        too_long = threading.Timer(END_S, self._give_up, [f"the engine has not ended within {END_S:g} s"])
        too_long.daemon = True
        too_long.start()
        self._link.close()


def executor_words(options: ServeOptions, endpoint: str) -> list[str]:
    of_dtype = ["--dtype", options.dtype] if options.dtype else []
    of_dtype += ["--quantize", options.quantize] if options.quantize else []
    joins = ["--batch-invariant"] if options.bitwise else []
    words = [str(options.model), "--listen", endpoint, "--log-format", options.log_format, *of_dtype, *joins]
    return procs.program("symbiosis.cli.main:executor_main", *words, name="executor")


def http_words(listener: socket.socket, link: socket.socket, options: FrontOptions) -> list[str]:
    started = msgspec.json.encode(Started(listener.fileno(), link.fileno(), options)).decode()
    return ["-m", "symbiosis.server.http_process", started]


def model_name(options: ServeOptions) -> str:
    """Return the name by which clients ask for the model."""
    return options.served_model_name or str(options.model)


def pooling_of(folder: Path) -> PoolingKind:
    """Return of what a checkpoint's vectors are made, as sentence-transformers notes it beside it."""
    try:
        told = json.loads((folder / "1_Pooling" / "config.json").read_text())
    except (OSError, ValueError):
        return "last"
    return "mean" if isinstance(told, dict) and told.get("pooling_mode_mean_tokens") else "last"


def must_be_the_model(served: Any, folder: Path, executor: str) -> None:
    """Raise `ConfigError` if the executor serves a model of another kind or size than the one in `folder`, whose tokenizer is used."""
    if not (folder / "config.json").is_file():
        return
    told = json.loads((folder / "config.json").read_text())
    own = told.get("text_config", told)
    differing = [name for name in KIND if name in own and getattr(served, name, own[name]) != own[name]]
    if differing:
        what = ", ".join(f"{name} {getattr(served, name)} instead of {own[name]}" for name in differing)
        raise ConfigError(
            f"{executor} serves another model than {folder} ({what}): MODEL must be the one that it serves"
        )


def serve(options: ServeOptions, listener: socket.socket) -> None:
    name_process("engine")
    take_turns_often()
    set_up_logging(options.log_format)
    ServeProcesses(options, listener).run()
