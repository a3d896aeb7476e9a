"""Where a model of `from_executor` lives that nobody gave a device: on the executor's GPU, if this program sees it."""

import logging

import torch

from symbiosis import transport
from symbiosis.protocol import Welcome
from symbiosis.transport.cuda.driver import device_name
from symbiosis.transport.tensors import CPU

UNSEEN = (
    "%s computes on a GPU of this host that this program does not see (it sees %d: %s), so the model is on the CPU, and each of its rows goes "
    "through the host's memory. Let the program see that GPU, or write device='cpu' if this is meant"
)
UNUSED = (
    "the model is on the CPU, and a GPU of this host is not used: from_executor(..., device='cuda') puts it there, device='cpu' says that this "
    "is meant. (%s computes on %s)"
)
logger = logging.getLogger("symbiosis")


def place_beside(told: Welcome, endpoint: str) -> torch.device:
    """Return the GPU of the executor at `endpoint`, if it is on this host and this program sees it; else the CPU, and say which GPU is not
    used."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if told.gpu and (found := next((gpu for gpu in gpus if device_name(gpu) == told.gpu), None)):
        return found
    is_here = transport.may_have_lines(endpoint) or transport.is_within_process(endpoint)
    if told.gpu and is_here:
        why = "CUDA_VISIBLE_DEVICES, or this torch is built without CUDA"
        logger.warning(UNSEEN, endpoint, len(gpus), why)
    elif gpus:
        logger.warning(UNUSED, endpoint, "a GPU of another host" if told.gpu else "a CPU")
    return CPU
