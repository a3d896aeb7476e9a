"""Nothing in the package unpickles, evaluates or executes what it was sent: read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import symbiosis

SOURCES = sorted(Path(symbiosis.__file__).parent.rglob("*.py"))
MODULES = frozenset(
    ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code", "codeop")
)
BUILTINS = frozenset(("eval", "exec", "compile", "__import__"))
WORDS = ("trust_remote_code", "allow_pickle", "weights_only")
METHODS = frozenset(("recv_pyobj", "send_pyobj", "recv_serialized", "rebuild_cuda_tensor"))
TORCH = frozenset(("torch.load", "torch.hub.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load"))
# What `symbiosis convert` reads, and nothing else does: a pickle that may name only classes of torch's checkpoints, and weights only.
ALLOWED = {"executor/model/distributed_checkpoint.py": ["pickle", "torch.load", "weights_only"]}


def faults(source: str) -> Iterator[str]:
    """What in `source` could run code that came from outside."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if str(node.module).split(".")[0] in MODULES:
                yield str(node.module)
            yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in TORCH)
        elif (
            isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load)
        ):  # a field may be named so
            yield node.id
        elif isinstance(node, ast.Attribute) and (node.attr in METHODS or ast.unparse(node) in TORCH):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg in WORDS and ast.unparse(node) != "trust_remote_code=False":
            yield str(node.arg)


def test_nothing_unpickles_or_evaluates() -> None:
    package = Path(symbiosis.__file__).parent
    found = {file.relative_to(package).as_posix(): sorted(faults(file.read_text())) for file in SOURCES}
    assert {name: named for name, named in found.items() if named} == ALLOWED


def test_only_convert_reads_pickles() -> None:
    """... and by a reader of its own that looks at each name."""
    for path in ALLOWED:
        source = (Path(symbiosis.__file__).parent / path).read_text()
        assert "def find_class" in source and "pickle.load" not in source and "weights_only=True" in source
    module = "symbiosis.executor.model.distributed_checkpoint"
    users = {file.name for file in SOURCES if f"from {module} import" in file.read_text()}
    assert users == {"convert.py"}


def test_the_executor_loads_safetensors_only() -> None:
    """from_pretrained would fall back to pickled weights unless it is told not to."""
    calls = [
        ast.unparse(node)
        for file in SOURCES
        if "executor" in file.parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    weights = [call for call in calls if "AutoConfig" not in call]
    assert weights
    assert all("use_safetensors=True" in call for call in weights), weights


def test_the_check_finds_what_it_looks_for() -> None:
    wrong = (
        "import pickle", "from pickle import loads", "import dill as d", "from torch import load", "torch.load(f)", "socket.recv_pyobj()",
        "eval(text)", "exec(text)", "f = eval", "yaml.load(f)", "m.from_pretrained(x, trust_remote_code=y)",
    )  # fmt: skip
    right = ("model.eval()", "yaml.safe_load(f)", "re.compile(p)", "torch.compile(m)", "f(trust_remote_code=False)")
    assert [source for source in (*wrong, *right) if list(faults(source))] == list(wrong)
