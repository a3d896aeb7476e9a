"""`Engine`: trains the adapters of any number of runs on one frozen model. What waits at the same time is computed in one pass."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from symbiosis.client.from_executor import built
from symbiosis.client.weights.remote_weight import close_sessions
from symbiosis.errors import AdapterError, ConfigError
from symbiosis.training.datum import Datum, check_tokens
from symbiosis.training.losses import Custom, slopes_of_function
from symbiosis.training.packed_model import PackedModel
from symbiosis.training.run_adapter import RunAdapter
from symbiosis.training.run_work import RunWork
from symbiosis.training.training_run import OPTIMIZER, Command, PassResult, Run

LINGER = 0.1  # of what the last pass took: so long a pass waits for runs that were in it


class TrainingEngine:
    """Trains many adapters on one frozen model.

    Args:
        model: A causal language model of transformers, wrapped or not, which is not changed; or the endpoint of an executor.
        max_tokens: Of one pass. Larger batches are computed in several, with the same result.
        wait: How long an executor may take to come up, in seconds; None: as long as it may be away later.
        compiled: Compile what lies between products by torch.compile, on a GPU. The first pass takes a minute, then, and those after it are faster.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor, symbiosis.training.Engine(executor.endpoint) as engine:
    ...     engine.packs
    True
    """

    def __init__(
        self, model: nn.Module | str, *, max_tokens: int = 8192, wait: float | None = None, compiled: bool = False
    ) -> None:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is positive, not {max_tokens}")
        self._own_model = built(model, {"wait": wait}, priority="train") if isinstance(model, str) else None
        self._model = PackedModel(model if isinstance(model, nn.Module) else self._own_model, compiled)  # type: ignore[arg-type]
        self._most = max_tokens
        self._runs: list[Run] = []
        self._last: list[Run] = []  # of the last pass
        self._last_s = 0.0
        self._passes = self._in_passes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="symbiosis-training", daemon=True)
        self._thread.start()

    @property
    def packs(self) -> bool:
        """Whether sequences are computed in one row of tokens; else they are padded to a rectangle."""
        return self._model.packs

    @property
    def joined(self) -> float:
        """How many runs a pass computed, on average."""
        return self._in_passes / max(self._passes, 1)

    def create(self, config: Any, *, seed: int | None = None, lora_plus: float = 1.0) -> Run:
        """Begin a run with a new adapter, which is the one that `torch.manual_seed(seed); get_peft_model(model, config)` makes.

        Args:
            config: Of PEFT, such as `LoraConfig`.
            lora_plus: By how much the learning rate of LoRA's B matrices is larger than that of the others.
        """
        run = Run(self, RunAdapter(self._model.skeleton, config, seed), lora_plus)
        self._model.add(run._adapter)
        with self._changed:
            self._refuse_if_closed()
            self._runs.append(run)
        return run

    def load(self, path: str | Path) -> Run:
        """Begin a run with a checkpoint of `Run.save`, or with an adapter that PEFT saved: then the optimizer begins anew."""
        from peft import PeftConfig

        folder = Path(path)
        if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
            raise AdapterError(f"{folder} is no adapter: it needs adapter_config.json and adapter_model.safetensors")
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False
        optimizer = folder / OPTIMIZER
        try:
            ratio = _lora_plus(optimizer) if optimizer.is_file() else 1.0
        except SafetensorError as error:
            raise AdapterError(f"{folder} is cut off or damaged: {error}") from error
        run = self.create(config, lora_plus=ratio)
        run.when_done(lambda: run.read(folder)).result()
        return run

    def check(self, data: Sequence[Datum]) -> None:
        """Refuse what the model cannot read."""
        check_tokens(data, self._model.vocabulary, self._model.longest)

    def put(self, run: Run, command: Command) -> Any:
        """Add a command to those of a run; return its future."""
        with self._changed:
            self._refuse_if_closed()
            if run not in self._runs:
                raise ConfigError("this run is closed")
            command.future.set_running_or_notify_cancel()  # what is put is done: others may come after it
            run.commands.append(command)
            self._changed.notify_all()
        return command.future

    def forget(self, run: Run) -> None:
        with self._changed:
            self._runs.remove(run)

    def close(self) -> None:
        """End, when all commands have been done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._own_model is not None:
            close_sessions(self._own_model)

    def __enter__(self) -> "TrainingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed")

    def _work(self) -> None:
        while taken := self._next():
            commands = [command for _, command in taken]
            if commands[0].work is None:
                _do(commands[0])
                continue
            began = time.monotonic()
            self._pass(commands)
            self._last, self._last_s = [run for run, _ in taken], time.monotonic() - began

    def _next(self) -> list[tuple[Run, Command]]:
        """Wait for what comes next: a call; or passes of several runs, those first that had least. Nothing, when the engine is closed."""
        with self._changed:
            while not any(run.commands for run in self._runs):
                if self._closed:
                    return []
                self._changed.wait()
            waiting = [run for run in self._runs if run.commands]
            for run in waiting:
                if run.commands[0].work is None:
                    return [(run, run.commands.popleft())]
            self._changed.wait_for(self._all_are_back, LINGER * self._last_s)
            return self._joined()

    def _all_are_back(self) -> bool:
        """Whether the runs of the last pass have something to do; or somebody has a call to make."""
        heads = [run.commands[0] for run in self._runs if run.commands]
        return self._closed or all(run.commands for run in self._last) or any(head.work is None for head in heads)

    def _joined(self) -> list[tuple[Run, Command]]:
        taken: list[tuple[Run, Command]] = []
        tokens = 0
        for run in sorted(self._runs, key=lambda run: run.tokens):
            while run.commands and run.commands[0].work is not None:
                size = run.commands[0].tokens
                if taken and tokens + size > self._most:
                    break
                taken.append((run, run.commands.popleft()))
                tokens, run.tokens = tokens + size, run.tokens + size
        return taken

    def _pass(self, commands: list[Command]) -> None:
        """Compute passes together. If that fails, each is computed by itself, so that nobody suffers by another's fault."""
        works = [command.work for command in commands if command.work is not None]
        joined = len({id(work.adapter) for work in works})
        self._passes, self._in_passes = self._passes + 1, self._in_passes + joined
        try:
            with _gradients_kept(works):
                for command, work in zip(commands, works, strict=True):
                    if command.function is not None:
                        self._differentiate(work, command.function)
                for part in _parts(works, self._most):
                    self._compute(part)
        except Exception as error:
            if len(commands) == 1:
                commands[0].future.set_exception(error)
                return
            for command in commands:
                self._pass([command])
            return
        for command, work in zip(commands, works, strict=True):
            command.future.set_result(PassResult(work.loss, [each.cpu() for each in work.found], joined))

    def _differentiate(self, work: RunWork, function: Custom) -> None:
        """Find the derivatives of a loss that only the program knows."""
        forward = RunWork(work.adapter, work.data, backward=False)
        for part in _parts([forward], self._most):
            self._compute(part)
        work.loss, work.given = slopes_of_function(function, forward.found, work.data)

    def _compute(self, works: list[RunWork]) -> None:
        self._model.compute(works)
        for work in works:
            assert work.whole is not None
            work.whole.found += work.found
            work.whole.loss += work.loss


def _do(command: Command) -> None:
    try:
        command.future.set_result(command.call())
    except Exception as error:
        command.future.set_exception(error)


@contextmanager
def _gradients_kept(works: Sequence[RunWork]) -> Iterator[None]:
    """If the block fails, the gradients of these runs are what they were before it."""
    flats = [flat for adapter in {w.adapter: None for w in works if w.backward} for flat in adapter.flats]
    bring_back = [flat.kept() for flat in flats]
    try:
        for flat in flats:
            flat.begin_gradients()
        yield
    except BaseException:
        for each in bring_back:
            each()
        raise


def _parts(works: Sequence[RunWork], most: int) -> Iterator[list[RunWork]]:
    """Cut works into passes of at most so many tokens, or of one sequence."""
    part, tokens = list[RunWork](), 0
    for work in works:
        first = 0
        for number, datum in enumerate(work.data):
            if tokens and tokens + len(datum) > most:
                part += [work.part(first, number)] if number > first else []
                yield part
                part, tokens, first = [], 0, number
            tokens += len(datum)
        part.append(work.part(first, len(work.data)))
    yield part


def _lora_plus(file: Path) -> float:
    with safe_open(file, "pt") as opened:
        return float(json.loads((opened.metadata() or {}).get("lora_plus", "1.0")))
