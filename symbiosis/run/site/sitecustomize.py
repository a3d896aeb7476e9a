"""What Python runs as it starts, where `symbiosis run` has put this folder on PYTHONPATH: it installs the hook, and runs the `sitecustomize` that
this one hides."""

# pathlib would take longer than all of this
# ruff: noqa: PTH100, PTH120
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _OwnPackage:
    """Finds `symbiosis` where this file lies, for a Python that has none: it is asked last, and for nothing else."""

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        package = os.path.dirname(os.path.dirname(HERE))
        return PathFinder.find_spec(name, [os.path.dirname(package)]) if name == "symbiosis" else None


def _run_hidden() -> None:
    """Run the next `sitecustomize` on the path, in the place of this one."""
    others = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    if (spec := PathFinder.find_spec("sitecustomize", others)) and spec.loader:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("SYMBIOSIS_RUN", "") not in ("", "0"):
    sys.meta_path.append(_OwnPackage)  # type: ignore[arg-type]
    try:
        from symbiosis.run import hook
    except ImportError as error:
        print(f"symbiosis: {sys.executable} cannot share models: {error}", file=sys.stderr, flush=True)
        if os.environ.get("SYMBIOSIS_RUN_REQUIRE", "") not in ("", "0"):
            os._exit(1)
    else:
        hook.install()
_run_hidden()
