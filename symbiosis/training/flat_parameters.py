"""Parameters of a run that lie one behind the other, and so do their gradients: whatever is done with all of them is done once."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

ALIGNED = 16  # numbers: each parameter begins at such a place


class FlatParameters:
    """Parameters of one dtype on one device. They stay the same objects; their values and gradients become parts of `values` and `gradients`.

    >>> a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(3))
    >>> flat = FlatParameters([a, b])
    >>> flat.begin_gradients(); a.grad += 5
    >>> [part.tolist() for part in flat.parts(flat.gradients)]
    [[[5.0, 5.0], [5.0, 5.0]], [0.0, 0.0, 0.0]]
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        rooms = [-(-p.numel() // ALIGNED) * ALIGNED for p in self.parameters]
        self._begins = [0, *torch.tensor(rooms).cumsum(0).tolist()]
        first = self.parameters[0]
        values, self.gradients = (
            torch.zeros(self._begins[-1], dtype=first.dtype, device=first.device) for _ in range(2)
        )
        for parameter, part in zip(self.parameters, self.parts(values), strict=True):
            part.copy_(parameter.detach())
            parameter.data, parameter.grad = part, None
        self.values = nn.Parameter(values)
        self._gradients = self.parts(self.gradients)

    @property
    def waits(self) -> bool:
        """Whether there are gradients that wait for a step."""
        return any(p.grad is not None for p in self.parameters[:1])

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return what belongs to each parameter of something that lies as they do."""
        return [flat[at : at + p.numel()].view(p.shape) for at, p in zip(self._begins, self.parameters, strict=False)]

    def to(self, device: torch.device) -> None:
        """Move to another device, gradients only if there are some."""
        if self.values.device == device:
            return
        waits = self.waits
        self.drop_gradients()
        self.values.data = self.values.detach().to(device)
        self.gradients = self.gradients.to(device) if waits else torch.zeros_like(self.values.detach())
        self._gradients = self.parts(self.gradients)
        for parameter, part in zip(self.parameters, self.parts(self.values.detach()), strict=True):
            parameter.data = part
        if waits:
            self.set_gradients()

    def begin_gradients(self) -> None:
        """Have gradients of zero, unless there are some already."""
        if not self.waits:
            self.gradients.zero_()
            self.set_gradients()

    def set_gradients(self) -> None:
        for parameter, part in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = part
        self.values.grad = self.gradients

    def drop_gradients(self) -> None:
        for parameter in (*self.parameters, self.values):
            parameter.grad = None

    def kept(self) -> Callable[[], None]:
        """Return what brings back the gradients that there are now."""
        if not self.waits:
            return self.drop_gradients
        before = self.gradients.clone()

        def bring_back() -> None:
            self.gradients.copy_(before)
            self.set_gradients()

        return bring_back


def flattened(parameters: Iterable[nn.Parameter], apart: Callable[[nn.Parameter], object]) -> list[FlatParameters]:
    """Lay parameters behind one another, those of other dtypes, devices, or of another answer of `apart` apart."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device, apart(parameter)), []).append(parameter)
    return [FlatParameters(each) for each in kinds.values()]
