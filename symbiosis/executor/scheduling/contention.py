"""Measures how many threads want each of the machine's cores."""

import os
from contextlib import suppress
from io import FileIO

MOST = 4.0
SMOOTHING = 0.05  # weight of the newest look


class Contention:
    """The number of threads that want each core, at least 1. A product on a CPU costs so many times its own time, because other
    threads, the clients' among them, wait for its core. So on a crowded machine it is worth more to save a product than to be on time.

    >>> Contention().now >= 1.0
    True
    """

    def __init__(self) -> None:
        self._file: FileIO | None = None  # without such a file no thread is taken to wait
        with suppress(OSError):
            self._file = FileIO("/proc/loadavg")
        self._cores = os.cpu_count() or 1  # the file counts threads of the whole host
        self._load = 1.0

    def look(self) -> None:
        """Take a new measurement, in about a microsecond."""
        if self._file:
            try:
                running = int(os.pread(self._file.fileno(), 64, 0).split()[3].partition(b"/")[0])
            except (OSError, ValueError, IndexError):  # a container may put another file in its place
                self.close()
                self._load = 1.0
            else:
                self._load += SMOOTHING * (running / self._cores - self._load)

    @property
    def now(self) -> float:
        return min(MOST, max(1.0, self._load))

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None
