"""How rows and gradients lie in memory decides how torch rounds, forward and backward: a split layer follows it, to the last bit."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import symbiosis

IN, OUT = 192, 128


def pair(serve: Callable, kind: type[nn.Module], bias: bool = True) -> list[nn.Module]:
    """The same layer, frozen, unsplit and split."""
    torch.manual_seed(0)
    layer = Conv1D(OUT, IN) if kind is Conv1D else nn.Linear(IN, OUT, bias=bias)
    plain = nn.ModuleDict({"layer": layer}).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(plain), serve(copy.deepcopy(plain)).endpoint)
    return [plain["layer"], split["layer"]]


def bits(*tensors: Tensor | None) -> list[bytes]:
    return [b"" if t is None else t.detach().flatten().float().numpy().tobytes() for t in tensors]


ROWS: dict[str, Callable[[int], Tensor]] = {
    "a matrix": lambda rows: torch.randn(IN, rows).t(),
    "a stack of one": lambda rows: torch.randn(1, IN, rows).mT,
    "a stack that is one matrix": lambda rows: torch.randn(IN, 2, rows).permute(1, 2, 0),
    "four dimensions": lambda rows: torch.randn(1, 1, IN, rows).mT,
}


@pytest.mark.parametrize("rows", [2, 3, 5, 8, 40])
@pytest.mark.parametrize("how", ROWS)
def test_rows_that_lie_column_by_column(serve: Callable, how: str, rows: int) -> None:
    seen = []
    for layer in pair(serve, nn.Linear, bias=False):
        torch.manual_seed(1)
        x = ROWS[how](rows).requires_grad_()
        y = layer(x)
        y.backward(torch.randn(y.shape))
        seen.append((bits(y, x.grad), x.grad.stride() if x.grad is not None else ()))
    assert seen[0] == seen[1]


LAYERS = [
    nn.Linear(257, 320, bias=False),
    nn.Linear(128, 512, bias=False),
    nn.Linear(96, 48),
    nn.Linear(96, 48, bias=False),
]
NARROW = [nn.Linear(64, 1, bias=False), nn.Linear(3, 8), nn.Linear(1, 100), Conv1D(17, 257), Conv1D(24, 128)]
SHAPES: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda rows, width: torch.randn(1, rows, width),
    "some of a text": lambda rows, width: torch.randn(1, rows + 7, width)[:, 3 : rows + 3],
    "the last of a text": lambda _, width: torch.randn(1, 9, width)[:, -1:],
    "the last of texts": lambda _, width: torch.randn(3, 9, width)[:, -1:],
    "columns": lambda rows, width: torch.randn(width, rows).t()[None],
    "columns of a stack of one": lambda rows, width: torch.randn(1, width, rows).mT,
    "columns of two": lambda rows, width: torch.randn(2, width, rows).mT,
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)],
    ids=lambda dtype: str(dtype)[6:],
)
def test_every_layout_of_rows_and_of_their_gradient(serve: Callable, dtype: torch.dtype) -> None:
    """Of layers of odd sizes."""
    torch.manual_seed(0)
    plain = copy.deepcopy(nn.ModuleList(LAYERS + NARROW)).to(dtype).requires_grad_(False)
    split = symbiosis.wrap(copy.deepcopy(plain), serve(copy.deepcopy(plain)).endpoint)
    differ = []
    for (number, layer), how, rows in itertools.product(enumerate(plain), SHAPES, [1, 2, 12, 33, 100]):
        is_conv, (outputs, inputs) = isinstance(layer, Conv1D), layer.weight.shape
        inputs, outputs = (outputs, inputs) if is_conv else (inputs, outputs)
        given = SHAPES[how](rows, inputs).to(dtype)
        if is_conv and how in ("the last of texts", "columns of two"):  # which a Conv1D does not take
            continue
        for by_columns in (False, True):
            shape = (*given.shape[:-1], outputs)
            dy = (torch.randn(shape).to(dtype).mT.contiguous().mT) if by_columns else torch.randn(shape).to(dtype)
            seen = []
            for each in (layer, layer, split[number]):
                x = given.detach().requires_grad_()
                y = each(x)
                y.backward(dy)
                seen.append(bits(y, x.grad))
            if seen[0] == seen[1] != seen[2]:
                differ.append((layer, how, tuple(given.shape), "by columns" if by_columns else "by rows"))
    assert differ == []


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("rows", [5, 40])
def test_their_gradient_where_there_is_a_bias(serve: Callable, kind: type[nn.Module], rows: int) -> None:
    seen = []
    for layer in pair(serve, kind):
        torch.manual_seed(1)
        x = torch.randn(IN, rows).t().requires_grad_()
        layer(x).backward(torch.randn(rows, OUT))
        seen.append(bits(x.grad))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_the_gradient_of_a_gradient_that_lies_so(serve: Callable, rows: int) -> None:
    seen = []
    for layer in pair(serve, nn.Linear):
        torch.manual_seed(1)
        x, dy = torch.randn(rows, IN, requires_grad=True), torch.randn(OUT, rows).t().requires_grad_()
        (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
        dx.backward(torch.randn(rows, IN))
        seen.append(bits(dx, dy.grad))
    assert seen[0] == seen[1]


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(2, 12, OUT),
    "columns": lambda: torch.randn(2, OUT, 12).mT,
    "one for all": lambda: torch.randn(2, 12, 1).expand(2, 12, OUT),
    "zeros": lambda: torch.zeros(2, 12, OUT),
}


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.parametrize("is_written", [False, True], ids=["the base's", "written"])
def test_the_gradient_of_a_bias(serve: Callable, kind: type[nn.Module], how: str, is_written: bool) -> None:
    seen = []
    for layer in pair(serve, kind):
        torch.manual_seed(1)
        bias = layer.bias.requires_grad_()
        bias.data += float(is_written)
        layer(torch.randn(2, 12, IN)).backward(GRADIENTS[how]())
        seen.append(bits(bias.grad))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 40])
def test_rows_times_the_weight_itself(serve: Callable, kind: type[nn.Module], rows: int) -> None:
    """As methods do that take a product of the weight for an adapter's: forward, backward, and with the bias."""
    seen = []
    for layer in pair(serve, kind):
        torch.manual_seed(1)
        weight = layer.weight if kind is Conv1D else layer.weight.t()  # [IN, OUT]
        found = []
        for x in (torch.randn(IN, rows).t(), torch.randn(rows, IN)):
            found += [x @ weight, torch.addmm(layer.bias, x, weight)]
        for a in (torch.randn(rows, OUT).t(), torch.randn(OUT, rows)):
            a.requires_grad_()
            (weight @ a).backward(torch.randn(IN, rows))
            found += [weight @ a, a.grad]
        seen.append(bits(*found))
    assert seen[0] == seen[1]
