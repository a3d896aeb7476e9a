"""A causal language model that trains adapters of several runs in one pass, forward and backward, over frozen weights."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import AdapterError, ConfigError, SymbiosisError
from symbiosis.kernels import with_triton
from symbiosis.kernels.gpu.streams import aside, wait_until_done
from symbiosis.kernels.row_invariant import row_invariant
from symbiosis.offload.logit_check import agree, logits_alone, place_of, probe_tokens, text_config
from symbiosis.serving.lora.peft_layers import Skeleton
from symbiosis.serving.runner.bitwise import make_bitwise
from symbiosis.serving.runner.compiled_layers import compile_layers
from symbiosis.serving.runner.shared_inputs import Group, find_groups
from symbiosis.training.activations import ActivationPlan, kept_bytes
from symbiosis.training.captured_pass import CapturedPass, PassTables, acting_groups
from symbiosis.training.datum import Datum
from symbiosis.training.losses import slopes
from symbiosis.training.low_rank import ActingRuns, LowRankSegment, SharedRows
from symbiosis.training.packed_head import PackedHead, SequencesAtHead, head_kernels
from symbiosis.training.recomputed_layers import RecomputedLayers
from symbiosis.training.run_adapter import RunAdapter
from symbiosis.training.run_work import RunWork
from symbiosis.training.sequence_packing import (
    NAME,
    CannotPack,
    Layout,
    PackLayout,
    Prefix,
    TableLayout,
    packed_as,
    register,
)

logger = logging.getLogger("symbiosis")


@dataclass(frozen=True)
class RunSegment:
    """The rows of one run in a pass: of the one axis, and of the sequences."""

    adapter: RunAdapter
    rows: slice
    sequences: slice


class PackedModel:
    """`model` stays as it is: what is changed is a copy that shares its weights."""

    def __init__(self, model: nn.Module, compiled: bool, recompute: bool | None = None, bitwise: bool = False) -> None:
        self.device, self.dtype = place_of(model)
        # beside that on which engines of this program make tokens
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.longest: int = getattr(text_config(model), "max_position_embeddings", None) or 1 << 30
        self.skeleton = Skeleton(model)
        self._model, self._is_bitwise = self.skeleton.copy(own_biases=False).eval(), bitwise
        if bitwise:
            make_bitwise(self._model)
        self._modules = dict(self._model.named_modules())
        self.head = PackedHead(self._model, bitwise)
        self._prompts: list[tuple[RunAdapter, int]] = []  # the first row of each prompt of the pass
        self._puts_prompts = False
        self._acting = ActingRuns(torch.zeros((), device=self.device, requires_grad=True))
        self._groups: list[SharedRows] = []
        self._sites: set[str] = set()  # where PEFT's own layers may run
        self._takes_rows: set[str] = set()
        self._layout: Layout = PackLayout((), True)
        self._segments = list[RunSegment]()
        register()
        self.packs = self._prepare()
        if bitwise and not self.packs:
            raise ConfigError(
                f"bitwise needs sequences in one row of tokens, and {type(model).__name__} has attention that cannot be replaced"
            )
        found = [group.names for group in self._found_groups() if not group.is_head]
        self._captured = CapturedPass(self._tabled, self.device) if self._can_be_captured() else None
        for names in found:
            self._share(names)
        self._usual = tuple(self._groups)  # which compiled code knows
        if self._captured is not None and compiled:
            self._model.get_input_embeddings().register_forward_hook(self._begin_gradients)  # type: ignore[operator, union-attr]
            compile_layers(self._model, text_config(model).num_hidden_layers)
        self._plan = ActivationPlan(recompute, self.device, self.head.vocabulary, self._kept_bytes)
        self._recomputed: RecomputedLayers | None = None  # not before they are needed
        if recompute and not self._can_recompute():
            raise ConfigError(f"{type(model).__name__} has no layers that can be computed again: leave recompute out")

    def add(self, adapter: RunAdapter) -> None:
        """Let an adapter act at its layers."""
        adapter.low_rank.pop(self.head.name, None)  # the head is given the rows in pieces
        others = [
            *adapter.layers.keys() - adapter.low_rank.keys(),
            *(["the prompt"] if adapter.virtual or adapter.prefix_length else []),
        ]
        if self._is_bitwise and others:
            raise AdapterError(
                f"with bitwise, adapters are LoRA without dropout at linear layers of the base, and this one does something else at {min(others)}"
            )
        for name in adapter.layers:
            if name == self.head.name and _draws(adapter.layers[name]):
                raise AdapterError(f"it has dropout at {name}, the head, which is computed twice: leave that out")
            if name not in self._takes_rows and name != self.head.name:
                raise AdapterError(
                    f"it acts at {name}, which is not given all rows in their order: leave that out of its targets"
                )
        own = adapter.layers.keys() - adapter.low_rank.keys() - self._sites
        for name in own:
            runs = self.head.run_layers if name == self.head.name else partial(self._run_layers, name)
            self._modules[name].register_forward_hook(runs)
        if adapter.prefix_length:
            self._prove_prefix(adapter)
        if adapter.virtual and not self._puts_prompts:
            self._puts_prompts = True
            self._model.get_input_embeddings().register_forward_hook(self._put_prompts)  # type: ignore[operator]
        self._sites |= own
        for name in adapter.low_rank:
            if not any(name in group.names for group in self._groups):
                self._share([name])

    def linear_layers(self) -> list[str]:
        """Return the names of the linear layers at which a LoRA can act, but for the head."""
        linear = [name for name, each in self._modules.items() if isinstance(each, nn.Linear | Conv1D)]
        return [name for name in linear if name in self._takes_rows and name != self.head.name]

    def _begin_gradients(self, module: nn.Module, inputs: Any, embedded: Tensor) -> None:
        """Let the first layer have a backward pass: compiled code has none where no rows need one."""
        if self._acting.tables is not None and torch.is_grad_enabled():
            embedded.requires_grad_()

    def _share(self, names: Sequence[str]) -> None:
        modules = [self._modules[name] for name in names]
        self._groups.append(SharedRows(len(self._groups), names, modules, self._acting))

    def compute(self, works: Sequence[RunWork]) -> None:
        """Find log probabilities and losses, and add to the gradients of the runs' parameters. All of it is there when this returns."""
        with aside(self._stream):
            self._compute_here(works)

    def _compute_here(self, works: Sequence[RunWork]) -> None:
        backward = any(work.backward for work in works)
        rows = sum(work.adapter.virtual + len(datum) for work in works for datum in work.data)
        again = backward and self._plan.recomputes(rows) and self._can_recompute()
        if (
            (graphs := self._captured) is not None
            and graphs.fits(works, self._usual)
            and graphs.compute(works, self._usual, again)
        ):
            return
        with torch.compiler.set_stance("force_eager"):  # compiled code does not see hooks
            self._compute(works, backward, again)

    def _recomputing(self, again: bool, adapters: Sequence[RunAdapter]) -> AbstractContextManager[None]:
        if not again:
            return nullcontext()
        assert self._recomputed is not None
        return self._recomputed.acting(self._layout, adapters)

    def _compute(self, works: Sequence[RunWork], backward: bool, again: bool) -> None:
        data = [datum for work in works for datum in work.data]
        owners = [work.adapter for work in works for _ in work.data]
        lengths = [adapter.virtual + len(datum) for adapter, datum in zip(owners, data, strict=True)]
        prefixes = RunPrefixes(owners, backward)
        self._layout = layout = PackLayout(tuple(lengths), self.packs, prefixes.of_each)
        self._prompts = [
            (adapter, first) for adapter, first in zip(owners, layout.firsts, strict=True) if adapter.virtual
        ]
        tokens = [pad(datum.tokens, (adapter.virtual, 0)) for adapter, datum in zip(owners, data, strict=True)]
        self._segments = list(_segments(works, layout))
        self._acting.segments = [LowRankSegment(each.rows, each.adapter.low_rank) for each in self._segments]
        self._acting.groups = acting_groups([work.adapter for work in works], self._groups)
        rows = torch.cat(
            [
                torch.arange(len(datum)) + first + adapter.virtual - datum.ahead
                for first, adapter, datum in zip(layout.firsts, owners, data, strict=True)
            ]
        )
        try:
            with self._recomputing(again, owners):
                with torch.set_grad_enabled(backward), packed_as(layout):
                    hidden = self._hidden(layout.inputs(tokens, self.device))
                rows = rows.to(hidden.device)
                head = SequencesAtHead(self.head, hidden.detach()[rows], owners, data)
                found = iter(head.logprobs())
                wait_until_done(self.device)
                wanted = [slope for work in works for slope in _finish(work, [next(found) for _ in work.data])]
                if backward:
                    gradient = head.backward(wanted)
                    if hidden.requires_grad:  # else they act at the head only
                        hidden.backward(torch.zeros_like(hidden).index_copy(0, rows, gradient))
                        prefixes.backward()
        finally:
            self._prompts = []
            self._segments, self._acting.segments, self._acting.groups = [], (), frozenset()

    def _tabled(self, *given: Any) -> Tensor:
        """Compute the pass that tables describe; this is captured. Returns log probabilities and losses, [2, rows]."""
        tables = PassTables(*given)
        self._layout = TableLayout(len(tables.ids), tables.begins, tables.longest)
        self._acting.tables = with_triton("gpu.trained_rows").RowTables(
            tables.tiles, tables.segments, tables.records, tables.ranks
        )
        self._acting.groups = tables.groups
        try:
            with self._recomputing(tables.recomputed, ()):
                with torch.set_grad_enabled(tables.backward), packed_as(self._layout):
                    hidden = self._hidden({"input_ids": tables.ids[None], "position_ids": tables.positions[None]})
                found, gradient = self.head.compute_tabled(hidden.detach(), tables)
                if tables.backward:
                    hidden.backward(gradient)
        finally:
            self._acting.tables, self._acting.groups = None, frozenset()
        return found

    def _can_be_captured(self) -> bool:
        """Whether tables alone can tell this model's attention who sees whom."""
        if self.device.type != "cuda" or not self.packs or with_triton("gpu.trained_rows") is None:
            return False
        texts = probe_tokens(self._model)
        packed = PackLayout(tuple(map(len, texts)), True)
        begins = torch.tensor([*packed.firsts, packed.rows], dtype=torch.int32, device=self.device)
        inputs = packed.inputs([torch.tensor(text) for text in texts], self.device)
        made = []
        try:
            for layout in packed, TableLayout(packed.rows, begins, max(packed.lengths)):
                with torch.no_grad(), packed_as(layout):
                    made.append(self.head.logits(self._hidden(inputs)))
            head_kernels().find(made[0].contiguous(), torch.zeros(packed.rows, dtype=torch.long, device=self.device))
        except CannotPack:
            return False
        except Exception as error:  # whatever a GPU without flash attention, or Triton without a compiler, makes of it
            logger.warning("training runs without kernels of its own: %s", error)
            return False
        return agree(made[1], made[0], self.dtype)

    def _can_recompute(self) -> bool:
        """Whether layers that are computed again have the gradients that they have otherwise. It is tried when it is asked for the first time."""
        if self._recomputed is not None:
            return bool(self._recomputed)
        expected = self._probed_gradient(again=False)
        self._recomputed = RecomputedLayers(self._model, self._acting.anchor)
        try:
            if self._recomputed and agree(self._probed_gradient(again=True), expected, self.dtype):
                return True
        except SymbiosisError:
            raise
        except Exception:  # noqa: S110  (whatever layers make of it that talk to each other)
            pass
        logger.warning(
            "training: the layers of this model cannot be computed again, so a pass keeps all that it computes"
        )
        self._plan.chosen = False
        return False

    def _probed_gradient(self, again: bool) -> Tensor:
        """Return the gradient of the embeddings of a short text, without adapters."""
        text, _ = probe_tokens(self._model)
        self._layout = layout = PackLayout((len(text),), self.packs)
        with self._recomputing(again, ()), self._embedded_leaf() as embedded, packed_as(layout), torch.enable_grad():
            hidden = self._hidden(layout.inputs([torch.tensor(text)], self.device))
            hidden.backward(torch.ones_like(hidden))
        gradient = embedded[0].grad
        assert gradient is not None
        return gradient

    def _kept_bytes(self, rows: int) -> int:
        """Return what a pass of so many rows keeps for its backward pass."""
        ids = torch.arange(rows) % self.head.vocabulary
        self._layout = layout = PackLayout((rows,), self.packs)
        with self._embedded_leaf(), packed_as(layout), torch.compiler.set_stance("force_eager"):
            return kept_bytes(self._model, lambda: self._hidden(layout.inputs([ids], self.device)))

    @contextmanager
    def _embedded_leaf(self) -> Iterator[list[Tensor]]:
        """In the block, what the embeddings make has a gradient."""
        made: list[Tensor] = []

        def begin(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
            made.append(embedded.detach().requires_grad_())
            return made[-1]

        hook = self._model.get_input_embeddings().register_forward_hook(begin)  # type: ignore[operator]
        try:
            yield made
        finally:
            hook.remove()

    def _prove_prefix(self, adapter: RunAdapter) -> None:
        """Refuse an adapter whose prefix has another effect in our attention than in the model's."""
        text, _ = probe_tokens(self._model)
        datum = Datum(torch.tensor(text[:-1]), torch.tensor(text[1:]))
        work = RunWork(adapter, [datum], backward=False)
        try:
            if self.packs:
                with torch.compiler.set_stance("force_eager"):
                    self._compute([work], backward=False, again=False)
                logits = logits_alone(adapter.peft.eval(), text[:-1])
                expected = logits.log_softmax(-1).gather(1, datum.targets[:, None].to(logits.device))[:, 0]
                if agree(work.found[0], expected, self.dtype):
                    return
        except SymbiosisError:
            raise
        except Exception as error:  # whatever PEFT and the model make of it
            raise AdapterError(f"its prefix does not fit this model's attention: {error}") from error
        finally:
            adapter.peft.train()
        raise AdapterError(
            "its prefix acts inside attention, which this model computes in a way of its own: wrap the model, and train it alone"
        )

    def _run_layers(self, name: str, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        """Run PEFT's layers on the rows of their runs. In a rectangle they are given whole sequences, as they are in a program."""
        segments = [
            each for each in self._segments if name in each.adapter.layers and name not in each.adapter.low_rank
        ]
        if not segments:
            return None
        x = inputs[0]
        along = int(self._layout.packed and y.dim() == 3)
        by_sequences = not self._layout.packed and y.dim() == 3
        parts, at = [], 0
        for segment in segments:
            span = segment.sequences if by_sequences else segment.rows
            count = span.stop - span.start
            result = segment.adapter.run(name, x.narrow(along, span.start, count), y.narrow(along, span.start, count))
            parts += [y.narrow(along, at, span.start - at), result.to(y.dtype)]
            at = span.stop
        return torch.cat([*parts, y.narrow(along, at, y.shape[along] - at)], along)

    def _put_prompts(self, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        """Put the prompts of runs in front of their sequences."""
        if not self._prompts:
            return None
        made = {adapter: adapter.prompt().to(y.dtype) for adapter, _ in self._prompts}
        rows = torch.cat([torch.arange(first, first + adapter.virtual) for adapter, first in self._prompts])
        values = torch.cat([made[adapter] for adapter, _ in self._prompts])
        return y.flatten(0, 1).index_copy(0, rows.to(y.device), values).view(y.shape)

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return what the head is given, [rows, width], whatever the model does before it."""
        kept: list[Tensor] = []

        def keep(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            kept.append(given[0])
            return (given[0][:, :1],)

        hook = self.head.module.register_forward_pre_hook(keep)
        try:
            with row_invariant(self._is_bitwise):
                self._model(**inputs, use_cache=False)
        finally:
            hook.remove()
        return kept[0].flatten(0, 1)

    def _prepare(self) -> bool:
        """Choose packing, if its logits are proved to be those that each sequence has alone; else rectangles, if theirs are."""
        texts = [*probe_tokens(self._model), probe_tokens(self._model)[1][::-1]]
        expected = [logits_alone(self._model, text) for text in texts]
        usual = self._model.config._attn_implementation  # type: ignore[union-attr]
        try:
            self._model.set_attn_implementation(NAME)  # type: ignore[operator]
            if self._agrees(texts, expected, packed=True):
                return True
        except SymbiosisError:
            raise
        except Exception:  # noqa: S110  (whatever a model makes of another attention)
            pass
        self._model.set_attn_implementation(usual)  # type: ignore[operator]
        if self._agrees(texts, expected, packed=False):
            return False
        raise ConfigError(
            f"{type(self._model).__name__} has other logits when sequences are computed together, packed or padded: wrap it, and train it alone"
        )

    def _found_groups(self) -> list[Group]:
        layout = PackLayout((len(probe_tokens(self._model)[0]),), self.packs)
        inputs = layout.inputs([torch.tensor(probe_tokens(self._model)[0])], self.device)
        with torch.no_grad(), packed_as(layout):
            return find_groups(self._model, lambda: self._model(**inputs, use_cache=False), self.head.module)

    @contextmanager
    def _finding_layers(self) -> Iterator[None]:
        """Find the layers that are given all rows in their order in a forward pass: adapters can act there."""
        self._takes_rows.clear()

        def look(name: str, _: nn.Module, inputs: tuple[Any, ...], y: Any) -> None:
            x = inputs[0] if inputs else None
            if isinstance(x, Tensor) and isinstance(y, Tensor) and y.shape[:-1].numel() == self._layout.rows:
                given = x.shape[:-1] if x.is_floating_point() else x.shape
                if given.numel() == self._layout.rows and y.dim() <= 3:
                    self._takes_rows.add(name)

        hooks = [module.register_forward_hook(partial(look, name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _agrees(self, texts: list[list[int]], expected: list[Tensor], packed: bool) -> bool:
        self._layout = layout = PackLayout(tuple(map(len, texts)), packed)
        with torch.no_grad(), packed_as(layout), self._finding_layers():
            hidden = self._hidden(layout.inputs([torch.tensor(text) for text in texts], self.device))
            made = [
                self.head.logits(hidden[first : first + len(text)])
                for first, text in zip(layout.firsts, texts, strict=True)
            ]
        return all(agree(mine, alone, self.dtype) for mine, alone in zip(made, expected, strict=True))


class RunPrefixes:
    """The prefixes of the sequences of a pass. Those of an adapter are made once, and so is the way back from what layers add to their gradients."""

    def __init__(self, owners: Sequence[RunAdapter], backward: bool) -> None:
        self._made: list[Tensor] = []
        self._leaves: list[Tensor] = []
        known: dict[RunAdapter, Prefix | None] = {}
        with torch.set_grad_enabled(backward):
            for adapter in dict.fromkeys(owners):
                layers = [tuple(map(self._leaf, pair)) for pair in adapter.prefix()] if adapter.prefix_length else []
                known[adapter] = Prefix(adapter.prefix_length, layers) if layers else None  # type: ignore[arg-type]
        self.of_each = tuple(known[adapter] for adapter in owners)

    def _leaf(self, made: Tensor) -> Tensor:
        self._made.append(made)
        self._leaves.append(made.detach().requires_grad_(made.requires_grad))
        return self._leaves[-1]

    def backward(self) -> None:
        there = [
            (made, leaf.grad) for made, leaf in zip(self._made, self._leaves, strict=True) if leaf.grad is not None
        ]
        if there:
            torch.autograd.backward([made for made, _ in there], [slope for _, slope in there])


def _finish(work: RunWork, found: list[Tensor]) -> list[Tensor]:
    """Set what was found of a work, and return the derivatives that its backward pass begins with."""
    work.found = found
    if work.given is not None:
        return work.given
    if not work.backward:
        return [torch.zeros_like(each) for each in found]
    made = [slopes(work.kind, each, datum, work.config) for each, datum in zip(found, work.data, strict=True)]
    work.loss = sum(loss for loss, _ in made)
    return [slope for _, slope in made]


def _segments(works: Sequence[RunWork], layout: PackLayout) -> Iterator[RunSegment]:
    firsts, number = [*layout.firsts, layout.rows], 0
    for work in works:
        end = number + len(work.data)
        yield RunSegment(work.adapter, slice(firsts[number], firsts[end]), slice(number, end))
        number = end


def _draws(layer: nn.Module | None) -> bool:
    return layer is not None and any(isinstance(module, nn.Dropout) and module.p for module in layer.modules())
