"""What a pass keeps for its backward pass, and whether there is room for it."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.base.memory import free_memory
from symbiosis.training.logit_pieces import LOGITS_BYTES

SHARE = 0.8  # of the free memory, that a pass may take
PROBED = 16, 48  # rows of two passes: what the second keeps more is for its rows
PLAIN = Tensor, nn.Parameter  # not those that lie in an executor
logger = logging.getLogger("symbiosis")


class ActivationPlan:
    """Says of which passes the layers are computed again in the backward pass.

    Args:
        chosen: True: of all; False: of none; None: of those for which there would be no room.
        kept_bytes: Tells what a pass of so many rows keeps.
    """

    def __init__(
        self, chosen: bool | None, device: torch.device, vocabulary: int, kept_bytes: Callable[[int], int]
    ) -> None:
        self.chosen = chosen
        self._device, self._vocabulary, self._kept_bytes = device, vocabulary, kept_bytes
        self._of_row: float | None = None

    def recomputes(self, rows: int) -> bool:
        if self.chosen is not None:
            return self.chosen
        if self._of_row is None:
            few, many = PROBED
            self._of_row = max(1.0, (self._kept_bytes(many) - self._kept_bytes(few)) / (many - few))
            logger.info(
                "training: a pass keeps %.3g KiB for each token, layers are computed again in passes for which there is no room",
                self._of_row / 2**10,
            )
        needs, room = self.needs(rows), SHARE * free_bytes(self._device)
        if needs <= room:
            return False
        logger.info(
            "training: %d tokens would keep %.3g GiB, and there is room for %.3g: their layers are computed again",
            rows,
            needs / 2**30,
            room / 2**30,
        )
        return True

    def needs(self, rows: int) -> float:
        """Return how many bytes a pass takes that keeps everything."""
        assert self._of_row is not None
        return rows * self._of_row + min(2 * LOGITS_BYTES, 8 * rows * self._vocabulary)


def kept_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Return how many bytes a forward pass keeps, if adapters act at all linear layers: they keep what these are given and return."""
    own = {p.data_ptr() for p in (*model.parameters(), *model.buffers()) if type(p) in PLAIN}
    kept: dict[int, Tensor] = {}  # by address: none is freed meanwhile, so that each has its own

    def keep(x: Any) -> Any:
        if type(x) in PLAIN and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    def look(_: nn.Module, inputs: tuple[Any, ...], y: Any) -> None:
        keep(inputs[0])
        keep(y)

    linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    hooks = [module.register_forward_hook(look) for module in linear]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(each.untyped_storage().nbytes() for each in kept.values())


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of memory a pass could have."""
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
