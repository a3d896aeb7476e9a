"""What tests of the transports have in common."""

import torch

from symbiosis.client.session import Session
from symbiosis.protocol import Op
from symbiosis.transport.tensors import TORCH_DTYPE

WAIT_S = 60.0


def anything(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    """Random bytes as this dtype: NaNs of all kinds among them."""
    kind = TORCH_DTYPE[dtype]
    count = torch.Size(shape).numel() * kind.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return raw.view(kind).view(shape)


def echoed(session: Session, x: torch.Tensor) -> bool:
    """Whether the very same bytes come back."""
    y = session.call(Op.ECHO, 0, x)
    same = torch.equal(y.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))
    return y.dtype == x.dtype and y.shape == x.shape and same
