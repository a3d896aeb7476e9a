"""An engine that trains: many adapters on one frozen base, in one step.

>>> import symbiosis, torch
>>> from peft import LoraConfig
>>> with symbiosis.Executor("demo") as executor, symbiosis.training.Engine(executor.endpoint) as engine:
...     run = engine.create(LoraConfig(r=4, target_modules="all-linear"), seed=0)
...     ids = torch.tensor([list(b"Once upon a time")])
...     losses = []
...     for _ in range(3):
...         losses.append(run.forward_backward({"input_ids": ids, "labels": ids}).result().loss)
...         _ = run.step(lr=1e-2)
>>> losses[0] > losses[1] > losses[2]
True
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symbiosis.training.checkpoint_folders import Checkpoint, checkpoints, expire
    from symbiosis.training.datum import Datum
    from symbiosis.training.mismatch import Mismatch
    from symbiosis.training.run_command import PassResult
    from symbiosis.training.training_engine import TrainingEngine as Engine
    from symbiosis.training.training_run import Run

_WHERE = {
    "Checkpoint": ("checkpoint_folders", "Checkpoint"),
    "Datum": ("datum", "Datum"),
    "Engine": ("training_engine", "TrainingEngine"),
    "Mismatch": ("mismatch", "Mismatch"),
    "PassResult": ("run_command", "PassResult"),
    "Run": ("training_run", "Run"),
    "checkpoints": ("checkpoint_folders", "checkpoints"),
    "expire": ("checkpoint_folders", "expire"),
}
__all__ = ["Checkpoint", "Datum", "Engine", "Mismatch", "PassResult", "Run", "checkpoints", "expire"]


def __getattr__(name: str) -> Any:
    """Import a name when it is used."""
    if name not in _WHERE:
        raise AttributeError(f"module 'symbiosis.training' has no attribute {name!r}")
    from importlib import import_module

    module, there = _WHERE[name]
    return getattr(import_module(f"symbiosis.training.{module}"), there)
