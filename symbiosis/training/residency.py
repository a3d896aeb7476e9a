"""Where runs are: on the device, in the host's memory, or on disk only. Those that were used last are nearest."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection

import torch

from symbiosis.training.activations import free_bytes
from symbiosis.training.run_command import Command, again, result_record
from symbiosis.training.run_journal import RunJournal, restoring
from symbiosis.training.train_state import TrainState
from symbiosis.training.training_run import Run

SHELLS = 16  # adapters of runs that left: to be filled with the numbers of others, since PEFT takes long to make one
HOST = torch.device("cpu")
logger = logging.getLogger("symbiosis")


class Residency:
    """Which runs are in memory. Used by the engine's thread only.

    Args:
        make: Makes the adapter that a run of this journal began with.
        do: Does a command again.
        in_memory: Runs, at most, if those that are idle can leave.
        on_device: Of these; None: as many as leave an eighth of its memory free.
    """

    def __init__(
        self,
        make: Callable[[RunJournal], TrainState],
        do: Callable[[TrainState, Command], None],
        in_memory: int,
        on_device: int | None,
    ) -> None:
        self._make, self._do = make, do
        self._in_memory, self._on_device = in_memory, on_device
        self._here: OrderedDict[Run, None] = OrderedDict()  # the last used one last
        self._at_home: OrderedDict[Run, None] = OrderedDict()  # of these: on the device
        self._shells: list[tuple[str, TrainState]] = []

    def __len__(self) -> int:
        return len(self._here)

    def bring(self, run: Run) -> TrainState:
        """Return what a run has in memory, on the device."""
        if run.state is None:
            run.state = self._woken(run)
        for order in (self._here, self._at_home):
            order[run] = None
            order.move_to_end(run)
        run.state.to(run.state.home)
        return run.state

    def drop(self, run: Run) -> None:
        """Forget what a run has in memory."""
        run.state, run.is_read = None, False
        self._here.pop(run, None)
        self._at_home.pop(run, None)

    def make_room(self, busy: Collection[Run]) -> None:
        """Let idle runs leave: those that were not used for longest. None of these does, which are in the midst of a pass."""
        for run in list(self._at_home)[:-1]:
            if not self._is_full():
                break
            if not run.commands and run not in busy and run.state is not None:
                run.state.to(HOST)
                del self._at_home[run]
        for run in list(self._here)[: max(0, len(self._here) - self._in_memory)]:
            if not run.commands and run not in busy and not self._leaves(run):
                return

    def _is_full(self) -> bool:
        """Whether there are too many runs on the device."""
        if self._on_device is not None:
            return len(self._at_home) > self._on_device
        used_last = next(reversed(self._at_home))
        if used_last.state is None or used_last.state.home.type != "cuda":
            return False
        device = used_last.state.home
        return free_bytes(device) < torch.cuda.mem_get_info(device)[1] // 8

    def write(self, run: Run) -> None:
        """Write a run's state to its folder. Raises `OSError` if there is no room: then its log goes on."""
        assert run.journal is not None and run.state is not None
        past = [
            result_record(verb, number, None if future.exception() else future.result(), future.exception())
            for number, verb, future in run.order.results()
        ]
        run.journal.write(run.state.tensors(), run.state.steps, past)
        run.is_read = False

    def tries_to_write(self, run: Run) -> bool:
        """Write it if there is room."""
        try:
            self.write(run)
        except OSError as error:
            logger.warning("%s", error)
            return False
        return True

    def close(self) -> None:
        """Write what would have to be done again."""
        for run in self._here:
            if run.journal is not None and run.journal.since:
                self.tries_to_write(run)

    def _leaves(self, run: Run) -> bool:
        state, journal = run.state, run.journal
        if state is None or journal is None:
            return False
        if (journal.since or not journal.has_state) and not self.tries_to_write(run):
            return False
        self.drop(run)
        if state.can_be_filled:
            state.to(HOST)
            self._shells = [(journal.key, state), *self._shells[: SHELLS - 1]]
        return True

    def _woken(self, run: Run) -> TrainState:
        assert run.journal is not None
        state = self._shell(run.journal) if run.journal.has_state else None
        with restoring(run.journal.folder):
            state = state or self._make(run.journal)
            if run.journal.has_state:
                state.put(run.journal.tensors())
            for record in run.journal.records():
                if (command := again(record)) is not None:
                    self._do(state, command)
        return state

    def _shell(self, journal: RunJournal) -> TrainState | None:
        for number, (key, state) in enumerate(self._shells):
            if key == journal.key:
                del self._shells[number]
                return state
        return None
