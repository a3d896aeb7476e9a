"""The events of a demo's client for its parent: a JSON object per line on stdout."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from symbiosis.base.memory import rss_bytes
from symbiosis.base.procs import follow_parent
from symbiosis.demo.processes import START

if TYPE_CHECKING:
    from torch import nn


class EventOutput:
    """Takes stdout for the events. Anything else that is printed goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, **fields: Any) -> None:
        self._file.write(json.dumps({**fields, "rss_bytes": rss_bytes()}) + "\n")

    def wait_for_start(self, **fields: Any) -> None:
        """Say that everything is prepared, and wait: the parent starts all clients at the same time. Without it there is nothing to do."""
        self.send(done=0, **fields)
        if sys.stdin.buffer.readline() != START:
            sys.exit("the process that started this one is gone")
        follow_parent()


def base_bytes(model: "nn.Module") -> int:
    """Return the memory that tensors of the base model take in this process, that is those that the executor does not serve."""
    from symbiosis.client.weights.remote_weight import RemoteWeight

    own = [p for name, p in model.named_parameters() if not isinstance(p, RemoteWeight) and not p.requires_grad]
    return sum(parameter.nbytes for parameter in own)
