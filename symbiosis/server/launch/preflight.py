"""Finds out what is wrong with a server's options before torch is imported, and says all of it at once."""

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

from symbiosis.base import requirements
from symbiosis.base.dtypes import DTYPE_BITS
from symbiosis.base.folders import Use, check_caches, user_folder
from symbiosis.base.memory import free_memory
from symbiosis.base.problems import problems_of, refuse
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import MODEL, check_whole, located, weight_files, weights_nbytes
from symbiosis.executor.model.quantisation import read_config, told_quantisation
from symbiosis.executor.options import Options
from symbiosis.executor.preflight import SMALLER, check_one_device, check_quantised, check_room, fewer_bits
from symbiosis.protocol.endpoints import is_within_process, parts_of
from symbiosis.server.launch import footprint
from symbiosis.serving.serve_options import ServeOptions, lora_modules
from symbiosis.serving.tensor_parallel.places import must_be_reachable

INSTALL = "`symbiosis serve` needs the packages of an extra: pip install 'symbiosis-llm[serve]'"
DEMO_ADAPTERS = Path(__file__).parents[2] / "demo_model" / "adapters"


def check(options: ServeOptions) -> socket.socket:
    """Return the bound port, or raise a `ConfigError` with a line for each thing that is wrong."""
    listeners = list[socket.socket]()
    refuse(problems_of([*CHECKS, lambda options: listeners.append(bound(options))], options))
    return listeners[0]


def check_packages(options: ServeOptions) -> None:
    if missing := [name for name in requirements.needed("serve") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{INSTALL} (missing here: {', '.join(missing)})")
    requirements.check("serve")


def check_model(options: ServeOptions) -> None:
    if options.model is None:
        raise ConfigError(f"no model: symbiosis serve MODEL, or `model:` in a --config file. {MODEL}")
    folder = located(options.model)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ConfigError(f"there is no tokenizer in {folder}: the API needs one")
    if options.executor is None and (files := weight_files(folder)):
        config = read_config(folder)
        check_quantised(Options(model=options.model, quantize=options.quantize), config)
        if options.devices and told_quantisation(config):
            raise ConfigError(
                f"--devices {options.devices}: quantised weights are not divided over several devices yet: serve {options.model!r} on one, where it "
                "needs a half or a quarter of the memory"
            )
        for file in files:
            check_whole(file)
        needed = weights_nbytes(files, DTYPE_BITS.get(options.dtype or ""), (), options.quantize)
        advice = f"{SMALLER}{fewer_bits(files, options.dtype)}"
        check_room(options.model, needed, free_memory(), "this machine", advice)


def check_memory(options: ServeOptions) -> None:
    """Check that the server has room with all pages that its options name, and with an executor of its own. Where that of another one is, it
    tells when it is asked."""
    if options.model is not None and options.executor is None:
        executor = Options(model=options.model, dtype=options.dtype, quantize=options.quantize)
        found = footprint.of_server(options, executor) + footprint.of_executor(executor)
        refuse(footprint.lacking("the server and its executor", found, {footprint.HOST: free_memory()}))


def check_executor(options: ServeOptions) -> None:
    if options.executor is None:
        return
    parts_of(options.executor)
    if is_within_process(options.executor):
        raise ConfigError(f"--executor {options.executor}: another process cannot reach it: write local:// or tcp://")
    for name in ("dtype", "quantize"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} is for the executor that this command starts: with --executor it is that one's"
            )


def check_devices(options: ServeOptions) -> None:
    """Check that there are the devices over which the model is divided, and that ranks reach its executor."""
    for device in dict.fromkeys(options.places):
        check_one_device(device, on_gpu=device != "cpu")
    if options.places and options.executor is not None:
        must_be_reachable(options.executor)


def check_adapters(options: ServeOptions) -> None:
    """Check that each is a folder of adapters, or NAME=PATH of one adapter."""
    folders = [each for each in options.adapters if not is_named(each)]
    if len(folders) > 1:
        raise ConfigError(
            f"--adapters is one folder of adapters, or any number of NAME=PATH, and not {len(folders)} folders"
        )
    for each in folders:
        if not Path(each).expanduser().is_dir():
            raise ConfigError(f"--adapters {each}: there is no such folder")
    for name, path in named(options):
        if not name or not (path / "adapter_config.json").is_file():
            raise ConfigError(f"adapter {name}={path}: there is no adapter_config.json in that folder")


def check_keys(options: ServeOptions) -> None:
    if options.api_keys and importlib.util.find_spec("starlette") is not None:
        from symbiosis.base.key_lines import read_keys

        read_keys(Path(options.api_keys))


def chat_template(options: ServeOptions) -> str | None:
    """Return the template of --chat-template. Raises `ConfigError` if it is none."""
    if options.chat_template is None:
        return None
    from jinja2 import Environment, TemplateSyntaxError

    try:
        text = Path(options.chat_template).expanduser().read_text()
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)  # noqa: S701  only looked at
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {options.chat_template}: it cannot be read: {error}") from None
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template {options.chat_template}: line {error.lineno}: {error.message}") from None
    return text


def check_compiled(options: ServeOptions) -> None:
    if options.compile:
        check_caches(inductor=True)


def check_training(options: ServeOptions) -> None:
    if options.train:
        from symbiosis.server.tinker.wire import check_package

        check_package()
        checkpoints_of(options)


CHECKS = (
    check_packages, check_model, check_memory, check_executor, check_devices, check_adapters, check_keys, chat_template, check_compiled, check_training,
)  # fmt: skip


def bound(options: ServeOptions) -> socket.socket:
    """Return a socket that has the address and does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for what can be no host's name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at {f'{options.host}:{options.port}'!r:.300}: {reason}") from None
    return listener


def folder_of(options: ServeOptions) -> Path | None:
    """Return the folder in which adapters are looked for by name."""
    for each in options.adapters:
        if not is_named(each):
            return Path(each).expanduser().resolve()
    return DEMO_ADAPTERS if options.model == "demo" and not options.adapters else None


def checkpoints_of(options: ServeOptions) -> Path:
    """Return the folder for checkpoints of what is trained here."""
    if options.checkpoints is None:
        return user_folder(Use.STATE, "checkpoints", make=True)
    folder = Path(options.checkpoints).expanduser().resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--checkpoints {folder}: it cannot be made: {error.strerror}") from None
    return folder


def named(options: ServeOptions) -> Iterator[tuple[str, Path]]:
    for each in options.adapters:
        if is_named(each):
            name, _, path = each.partition("=")
            yield name, Path(path).expanduser().resolve()
    for module in lora_modules(options.lora_modules):
        yield module.name, Path(module.path).expanduser().resolve()


def is_named(given: str) -> bool:
    """Whether it is NAME=PATH. A folder that is there may have = in its path."""
    return "=" in given and not Path(given).expanduser().is_dir()
