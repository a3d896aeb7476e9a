"""Attacks on the adapter: its matrices in closed form from the inputs and outputs of layers, and a copy trained on the log."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from symbiosis.audit.operator_view import OperatorView
from symbiosis.audit.owner import BYTES, RANK, TARGETS, TRAIN_BATCH, Owner
from symbiosis.audit.public_knowledge import PublicKnowledge
from symbiosis.base.layer_names import modules_in_base
from symbiosis.client.layers.layer_plan import base_model
from symbiosis.executor.model.load import load_model
from symbiosis.protocol import Op

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
LEAST, MOST = 0.02, 20.0  # factors by which the attacker dares to divide
RIDGE = 1e-4
DISTIL_RATE = 1e-2


def value_projection(view: OperatorView, public: PublicKnowledge) -> list[Tensor]:
    """Estimate v_proj's dW. Attention over one token passes its value on, so o_proj's input is `(W + dW) x`, and x is known for each
    token. There is one estimate for each time that all tokens were sent."""
    x_TK = public.dictionary()[:BYTES].double()
    heads = public.model.config
    kv, copies = heads.num_key_value_heads, heads.num_attention_heads // heads.num_key_value_heads
    gram = x_TK.t() @ x_TK
    solve_KT = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram)), x_TK.t())
    weight = public.weights[f"{ATTENTION}.v_proj"].double()
    estimates = []
    for rows in view.floats(Op.FORWARD, f"{ATTENTION}.o_proj", "first", "more first", public=public):
        v_TN = rows.view(len(rows), kv, copies, -1).mean(2).flatten(1)
        estimates += [(solve_KT @ (values - x_TK @ weight.t())).t() for values in v_TN.split(BYTES)]
    return estimates


def gate_projection(view: OperatorView, public: PublicKnowledge) -> list[Tensor]:
    """Estimate gate_proj's dW. Where down_proj's input, divided by up_proj's output, is positive, it shows gate_proj's output, dW
    included, because SiLU is one to one there."""
    weight, equations = (
        public.weights[f"{MLP}.gate_proj"].double(),
        Equations(*public.weights[f"{MLP}.gate_proj"].shape),
    )
    for x_TK, gate_TN in _gated(view, public, "known", "more known"):
        usable = (gate_TN > LEAST) & (gate_TN < MOST)
        equations.add(x_TK, _silu_inverse(gate_TN.where(usable, 1.0)) - x_TK @ weight.t(), usable.double())
    return [equations.solution()]


def down_projection(view: OperatorView, public: PublicKnowledge) -> list[Tensor]:
    """Estimate down_proj's dW: up_proj's gradient, divided by what the gate let through, is `dy (W + dW)`, and down_proj's gradient is
    dy."""
    weight = public.weights[f"{MLP}.down_proj"].double()
    equations = Equations(*weight.t().shape)
    gradients = (view.floats(Op.DGRAD, f"{MLP}.{name}", "train", public=public) for name in ("down_proj", "up_proj"))
    for (_, gate_TN), dy_TK, up_TN in zip(_gated(view, public, "train"), *gradients, strict=True):
        usable = (gate_TN.abs() > LEAST) & (gate_TN.abs() < MOST)
        made = (up_TN / gate_TN).where(usable, 0.0) - dy_TK @ weight
        equations.add(dy_TK, made, gate_TN.square().where(usable, 0.0))
    return [equations.solution().t()]


def _gated(view: OperatorView, public: PublicKnowledge, *phases: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each call, the gate's input and what it let through: down_proj's input divided by up_proj's output."""
    weight = public.weights[f"{MLP}.up_proj"].double()
    calls = (view.floats(Op.FORWARD, f"{MLP}.{name}", *phases, public=public) for name in ("gate_proj", "down_proj"))
    for x_TK, down_TN in zip(*calls, strict=True):
        up_TN = x_TK @ weight.t()
        yield x_TK, (down_TN / up_TN).where(up_TN.abs() > LEAST, 0.0)


def _silu_inverse(y: Tensor) -> Tensor:
    """Return the positive x with `silu(x) = y`, by Newton's method from above."""
    x = y + 0.3
    for _ in range(30):
        slope = torch.sigmoid(x)
        x = x - (x * slope - y) / (slope * (1 + x * (1 - slope)))
    return x


class Equations:
    """Least squares for the matrix that makes y of x, with weights for each column, many of them zero. It keeps sums only, however many
    tokens there are."""

    def __init__(self, columns: int, width: int) -> None:
        self._gram_NKK = torch.zeros(columns, width, width, dtype=torch.float64)
        self._right_NK = torch.zeros(columns, width, dtype=torch.float64)

    def add(self, x_TK: Tensor, y_TN: Tensor, weights_TN: Tensor) -> None:
        for n, (y, weights) in enumerate(zip(y_TN.t(), weights_TN.t(), strict=True)):
            counted = weights > 0
            x = x_TK[counted]
            weighted = x * weights[counted, None]
            self._gram_NKK[n].addmm_(weighted.t(), x)
            self._right_NK[n].addmv_(weighted.t(), y[counted])

    def solution(self) -> Tensor:
        for gram_KK in self._gram_NKK:
            gram_KK.diagonal().add_(1e-8 * gram_KK.diagonal().mean() + 1e-12)
        return torch.linalg.solve(self._gram_NKK, self._right_NK)


MATRICES: dict[str, Callable[[OperatorView, PublicKnowledge], list[Tensor]]] = {
    f"{ATTENTION}.v_proj": value_projection,
    f"{MLP}.gate_proj": gate_projection,
    f"{MLP}.down_proj": down_projection,
}


def cosine(layer: str, estimates: list[Tensor], owner: Owner, public: PublicKnowledge) -> float:
    """Return the cosine of the estimated and the true dW, both without their multiple of W, which is no news: the mean over all
    estimates."""
    weight, true = public.weights[layer].double().flatten(), _true(layer, owner)
    along = F.normalize(weight, dim=0)
    true = true - (true @ along) * along
    flat = [estimate.flatten() for estimate in estimates]
    return sum(F.cosine_similarity(e - (e @ along) * along, true, dim=0).item() for e in flat) / len(flat)


def _true(layer: str, owner: Owner) -> Tensor:
    a, b = (next(p for name, p in owner.adapter.items() if f"{layer}.lora_{part}" in name) for part in "AB")
    return 2.0 * (b.double() @ a.double()).flatten()


def distilled(view: OperatorView, public: PublicKnowledge, known: list[Tensor], steps: int) -> torch.nn.Module:
    """Train an adapter of the same kind until its layers get the rows that the log shows for known tokens."""
    ids = torch.cat(known)
    names = [name for name in public.weights if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj"))]
    wanted = {n: torch.cat(view.rows(Op.FORWARD, n, "known")).view(*ids.shape, -1).float() for n in names}
    torch.manual_seed(1)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS))
    student: torch.nn.Module = get_peft_model(load_model("demo"), config)  # type: ignore[arg-type]
    given: dict[str, Tensor] = {}
    for _, name, module in modules_in_base(base_model(student)):
        if name in wanted and hasattr(module, "weight"):
            module.register_forward_pre_hook(lambda _, inputs, name=name: given.update({name: inputs[0]}))
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=DISTIL_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, DISTIL_RATE, steps)
    for _ in range(steps):
        some = torch.randint(len(ids), (TRAIN_BATCH,))
        student(input_ids=ids[some])
        losses = [1 - F.cosine_similarity(given[name], wanted[name][some], dim=-1).mean() for name in names]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return student.eval()


def stolen(student: torch.nn.Module, held_out: Tensor, owner: Owner, public: PublicKnowledge) -> float:
    """Return how much of the adapter's effect the student has: 1 - its KL to the owner's model / that of the base model."""
    with torch.no_grad():
        copied, base = (
            _divergence(owner.logits, model(input_ids=held_out).logits) for model in (student, public.model)
        )
    return 1 - copied / base


def _divergence(true: Tensor, other: Tensor) -> float:
    p, q = true.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()
