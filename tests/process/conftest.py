"""Fixtures of tests that start processes, or look at what executors see. Torch is imported where it is used, as in `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import symbiosis
from tests.conftest import tiny_llama

if TYPE_CHECKING:
    from torch import nn

    from symbiosis.client.session import Session


@pytest.fixture
def executor(url: str, serve: Callable) -> symbiosis.Executor:
    return serve(tiny_llama(), listen=[url], policy="immediate")


@pytest.fixture
def session(executor: symbiosis.Executor) -> Iterator[Session]:
    from symbiosis.client.session import Session

    session = Session(executor.endpoint)
    yield session
    session.close()


@pytest.fixture
def two(serve: Callable) -> Callable[[nn.Module], tuple[symbiosis.Executor, symbiosis.Executor]]:
    """Executors of two operators."""

    def start(model: nn.Module, **options: Any) -> tuple[symbiosis.Executor, symbiosis.Executor]:
        options = {"integers": [8, 16], **options}
        return serve(model, operator="one", **options), serve(model, operator="two", **options)

    return start


@pytest.fixture
def pads(tmp_path: Path) -> Callable[..., Path]:
    """A file of pads for a model, with gradients."""
    from symbiosis.cli.pad_files import make
    from tests.private import TOKENS

    def build(model: nn.Module, tokens: int = TOKENS, bits: int = 8, name: str = "x.pads") -> Path:
        if not (tmp_path / "model").exists():
            model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
        make(str(tmp_path / "model"), tokens, tmp_path / name, bits, training=True)
        return tmp_path / name

    return build
