"""What every operator knows before anything is sent: the model, text of its own, and the statistics of the layers' rows on that text."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from symbiosis.audit.owner import LENGTH, Truth, linear_layers
from symbiosis.demo.data import base_text, blocks
from symbiosis.executor.model.load import DEMO_MODEL, load_model
from symbiosis.kernels.integers import quantise
from symbiosis.protocol import Op

Key = tuple[Op, str]
PASSAGES, BATCH = 96, 16
SHORTEST = 1e-300
RIDGE = 1e-3


class PublicKnowledge:
    """The weights, and the mean and covariance of each layer's rows, as a level takes them: either as they are, or (`integers`) as the
    fixed-point code prepares them, each of length 1."""

    def __init__(self, bits: int = 8) -> None:
        from transformers import AutoTokenizer

        self.bits = bits
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self.model: Any = load_model("demo")
        self.weights = {name: self.model.get_parameter(f"{name}.weight").detach() for name in linear_layers(self.model)}
        self._units = {name: quantise(w.t(), bits)[1] for name, w in self.weights.items()}
        self._rows = self._rows_of_base()
        self.mean, self.covariance, self.precision = cache(self._mean), cache(self._covariance), cache(self._precision)

    def _rows_of_base(self) -> dict[Key, Tensor]:
        truth = Truth(self.model, list(self.weights))
        truth.keeps = True
        for ids in torch.tensor(blocks(base_text(), self.tokenizer, LENGTH, PASSAGES, seed=2)).split(BATCH):
            self.model(input_ids=ids, labels=ids).loss.backward()
        truth.keeps = False
        self.model.requires_grad_(False)
        return {key: torch.cat(rows) for key, rows in truth.rows.items()}

    @property
    def head(self) -> str:
        return next(name for name in self.weights if name.endswith("lm_head"))

    def taken(self, key: Key, rows: Tensor, integers: bool) -> Tensor:
        """Return the rows as a level takes them, before it masks them."""
        op, layer = key
        rows = rows.double()
        if not integers:
            return rows
        return F.normalize(rows * self._units[layer] if op is Op.DGRAD else rows, dim=1, eps=SHORTEST)

    def _mean(self, key: Key, integers: bool) -> Tensor:
        return self.taken(key, self._rows[key], integers).mean(0)

    def _covariance(self, key: Key, integers: bool) -> Tensor:
        """Return the covariance of the rows, with a little more in each direction, so that none is impossible."""
        covariance = self.taken(key, self._rows[key], integers).t().cov()
        return covariance + RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance))

    def _precision(self, key: Key, integers: bool) -> Tensor:
        return torch.linalg.inv(self.covariance(key, integers))

    def size(self, key: Key) -> float:
        """Return the root mean square of the values."""
        return self._rows[key].double().square().mean().sqrt().item()

    def dictionary(self) -> Tensor:
        """Return the first layer's input for each token."""
        with torch.no_grad():
            first = self.model.model.layers[0].input_layernorm
            return first(self.model.get_input_embeddings().weight)
