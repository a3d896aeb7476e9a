"""The hook of `symbiosis run` in a Python process: it waits for modules that load models, and has them changed once they have run.

Every Python process under the command installs it as it starts, by `symbiosis/run/site/sitecustomize.py` or, where Symbiosis is installed, by
`symbiosis_run.pth`. So it imports nothing: a process that never imports transformers pays for a finder on `sys.meta_path`, and no more.
"""

import sys

from symbiosis.run.switch import is_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WATCHED = ("transformers.modeling_utils", "vllm.engine.arg_utils", "sglang.srt.server_args")


def install() -> None:
    """Watch this process's imports, if it belongs to a program under `symbiosis run`. Once more does no harm."""
    if is_on() and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())  # type: ignore[arg-type]


class _Watcher:
    """Finds the watched modules as the other finders do, and has them changed once they have run."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                spec.loader = _ThenChanged(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _ThenChanged:
    """A loader whose module is changed when it has run."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def create_module(self, spec: "Any") -> "Any":
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from symbiosis.run.patch import change

        change(module)
