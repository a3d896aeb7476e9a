"""What `tensor.data = weight` means to an ordinary tensor.

torch would give it the weight's shape and no memory, and reading it would end the process. Nothing but the attribute itself can tell, so this
replaces `torch.Tensor.data` by one that looks at what is assigned.
"""

from typing import Any

import torch
from torch import Tensor

from symbiosis.client.weights.remote_sum import RemoteSum
from symbiosis.client.weights.remote_weight import RemoteWeight

_data: Any = torch.Tensor.data


def _assign(tensor: Tensor, value: Any) -> None:
    if isinstance(value, RemoteWeight):
        value = value.memory("data=")  # where the tensor lies from now on, too
    elif isinstance(value, RemoteSum):
        value = value + torch.zeros((), dtype=value.dtype, device=value.device)
    _data.__set__(tensor, value)


def guard_data() -> None:
    """Let ordinary tensors take the values of remote weights, where reads are allowed."""
    if vars(torch.Tensor).get("data") is None:
        setattr(torch.Tensor, "data", property(_data.__get__, _assign))  # noqa: B010
