"""How far a stranger has to read: the functions that a call, a product and a request run through, and what a new part touches.

Functions are counted as they run, by `sys.setprofile` in every process (`_recorder.py`), in programs that are warm: the fewest distinct ones of
several samples. Those of a call end with its answer: what the executor books afterwards is seen or not, as the client is slower or quicker. All else is read in the sources.

    python scripts/paths.py              # a table, with what each figure is to reach, and one JSON object; half a minute
    python scripts/paths.py --names      # ... and the functions of each path, in files
    python scripts/paths.py --static     # only what is read in the sources
"""

import argparse
import ast
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import _recorder
from _recorder import Flag

from symbiosis.base.procs import python
from symbiosis.base.reporting import Report

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "symbiosis"
SAMPLES, PATIENCE_S = 5, 120.0
BOOKED = "Ledger.answered"  # what the executor enters first when it has answered a call
PARTS = {
    "an op": "An op",
    "a transport": "A transport",
    "a sampling parameter": "A sampling parameter",
    "an option of the executor": "An option of the executor",
    "an option of an endpoint": "An option of an endpoint",
}
GOALS = {
    "functions: call, client": 25,
    "functions: call, executor": 48,
    "functions: mapped, client": 4,
    "functions: completion": 170,
    "functions: put": 65,
    "functions: cluster": 240,
    "files besides its own: an op": 12,
    "files besides its own: a transport": 7,
    "files besides its own: a sampling parameter": 5,
    "files besides its own: an option of the executor": 2,
    "files besides its own: an option of an endpoint": 5,
    "class names in several rooms": 0,
    "file names in several rooms": 8,
    "words": 50,
    "words with several meanings": 0,
    "lines": 39_000,
}
LEFT_OUT = ("audit", "demo")  # of the lines


# ---------------------------------------------------------------- what runs


class Paths:
    """Runs things under the recorder, and says which functions they went through."""

    def __init__(self, folder: Path) -> None:
        self.flag, self._numbers = Flag(folder), count(1)
        self.samples: dict[str, list[int]] = {}

    def record(self, name: str, run: Callable[[], object]) -> None:
        """Run it several times. What the processes of servers do after their answer still belongs to it."""
        run()  # nothing is cached before
        self.samples[name] = [next(self._numbers) for _ in range(SAMPLES)]
        for number in self.samples[name]:
            time.sleep(0.3)  # so that nothing of the one before is still under way
            self.flag.record(number)
            run()
            self.flag.record(0)

    def functions(self, name: str, pids: Callable[[int], bool], before: str = "") -> set[tuple[str, str]]:
        """Return the distinct functions of the processes asked for, in the sample with the fewest: other samples were interrupted. Those
        that run after a process has entered `before` do not count."""
        runs: dict[int, set[tuple[str, str]]] = {number: set() for number in self.samples[name]}
        over = set[tuple[int, int]]()
        for noted in self.flag.noted():  # in the order in which each process entered them
            if noted.path in runs and pids(noted.pid):
                if noted.function == before:
                    over.add((noted.path, noted.pid))
                if (noted.path, noted.pid) not in over:
                    runs[noted.path].add((noted.file, noted.function))
        return min(runs.values(), key=len)

    def processes(self, name: str) -> set[int]:
        return {noted.pid for noted in self.flag.noted() if noted.path in self.samples[name]}

    def ran_in(self, pid: int, part: str) -> bool:
        """Whether a process has run anything of a part of the package."""
        return any(noted.pid == pid and noted.file.startswith(part) for noted in self.flag.noted())


def record_calls(paths: Paths, folder: Path) -> dict[str, set[tuple[str, str]]]:
    """A training call and a product by mapped weights, of one layer of the demo model."""
    import torch

    import symbiosis

    torch.set_num_threads(1)
    endpoint = f"local://{folder}/executor.sock"
    with program("executor_main", "demo", "--listen", endpoint) as executor:
        eventually(lambda: (folder / "executor.sock").exists())
        found = {}
        for share, name in ((False, "call"), (True, "mapped")):
            model = symbiosis.from_executor(endpoint, share=share, patience=PATIENCE_S, device="cpu")
            layer = model.model.layers[0].self_attn.q_proj
            rows = torch.randn(64, layer.in_features, requires_grad=True)
            paths.record(name, lambda: layer(rows))  # noqa: B023
            found[f"{name}, client"] = paths.functions(name, lambda pid: pid == os.getpid())
            if not share:
                found["call, executor"] = paths.functions(name, lambda pid: pid == executor.pid, before=BOOKED)
    return found


def record_requests(paths: Paths, folder: Path) -> dict[str, set[tuple[str, str]]]:
    """A streamed completion of one token, and an adapter that is sent, at a server of the demo model."""
    import httpx

    port = free_port()
    adapter = adapter_file()
    found = {}
    with program(
        "main",
        "serve",
        "demo",
        "--port",
        str(port),
        "--memory",
        "256MiB",
        "--adapters",
        str(new_folder(folder, "adapters")),
    ):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as web:
            eventually(lambda: is_up(web))
            paths.record("completion", lambda: complete(web))
            paths.record("put", lambda: web.put("/v1/adapters/measured", content=adapter).raise_for_status())
        for name in ("completion", "put"):
            pids = paths.processes(name) - {os.getpid()}
            http = {pid for pid in pids if not paths.ran_in(pid, "executor/") and not speaks_for_engine(paths, pid)}
            engine = {pid for pid in pids if speaks_for_engine(paths, pid)}
            found[f"{name}, HTTP"] = paths.functions(name, http.__contains__)
            found[f"{name}, engine"] = paths.functions(name, engine.__contains__)
            found[name] = found[f"{name}, HTTP"] | found[f"{name}, engine"]
    return found


def speaks_for_engine(paths: Paths, pid: int) -> bool:
    return paths.ran_in(pid, "serving/engine/engine_loop")


def record_cluster(paths: Paths, folder: Path) -> dict[str, set[tuple[str, str]]]:
    """The same completion, through the front end of a cluster."""
    import httpx

    port, file = free_port(), folder / "cluster.yaml"
    file.write_text(
        f"name: measured\nport: {port}\nmodels:\n  demo:\n    executors: 1\n    servers: 1\n    server: {{memory: 256MiB}}\n"
    )
    with (
        program("main", "cluster", "up", str(file)),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as web,
    ):
        eventually(lambda: is_up(web))
        paths.record("cluster", lambda: complete(web))
        pids = {pid for pid in paths.processes("cluster") if pid != os.getpid() and not paths.ran_in(pid, "executor/")}
        return {"cluster": paths.functions("cluster", pids.__contains__)}


def complete(web: Any) -> None:
    body = {"model": "demo", "prompt": "def average(", "max_tokens": 1, "temperature": 0, "stream": True}
    answer = web.post("/v1/completions", json=body).raise_for_status()
    assert answer.text.rstrip().endswith("[DONE]"), answer.text


def adapter_file() -> bytes:
    """One of the demo's adapters, as `PUT` takes it."""
    from safetensors.torch import load_file, save

    adapter = PACKAGE / "demo_model/adapters/shout"
    config = (adapter / "adapter_config.json").read_text()
    return save(load_file(adapter / "adapter_model.safetensors"), {"adapter_config": config})


# ---------------------------------------------------------------- programs


@contextmanager
def program(entry: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of the package, ended with SIGTERM."""
    module = entry_module()
    process = subprocess.Popen(
        python("-c", f"from {module} import {entry}; {entry}()", *arguments), stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def entry_module() -> str:
    """Return where the commands begin, as pyproject.toml says."""
    found = re.search(r'^symbiosis = "([\w.]+):main"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found.group(1)


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit("a program did not become ready")
        time.sleep(0.05)


def is_up(web: Any) -> bool:
    import httpx

    try:
        return bool(web.get("/health").status_code == 200)
    except httpx.TransportError:
        return False


def new_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


# ---------------------------------------------------------------- what is read in the sources


def files_of_a_part(title: str) -> set[str]:
    """The files, besides those that are made for it, that docs/extending.md sends one to who adds such a part."""
    text = (ROOT / "docs/extending.md").read_text()
    found = re.search(rf"^\*\*{title}\.\*\*(.*?)(?=^\*\*|^## )", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md|c|html|toml))`", found.group(1)))


def files_that_mention(names: set[str]) -> float:
    """The median, over the names, of files of the package and its tests in which one occurs."""
    sources = [path.read_text() for folder in ("symbiosis", "tests") for path in (ROOT / folder).rglob("*.py")]
    words = [set(re.findall(r"\w+", text)) for text in sources]
    return statistics.median(sum(name in file for file in words) for name in names)


def fields_of(class_name: str) -> set[str]:
    """The fields of a struct, or the members of an enumeration, wherever it is."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                named = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                named += [target for each in node.body if isinstance(each, ast.Assign) for target in each.targets]
                return {target.id for target in named if isinstance(target, ast.Name)}
    raise SystemExit(f"the package has no class {class_name}")


def rooms() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Classes, and names of files, with the folders that have them."""
    classes, files = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in PACKAGE.rglob("*.py"):
        room = path.parent.relative_to(PACKAGE).as_posix()
        if path.name != "__init__.py":
            files[path.name].add(room)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(room)
    return classes, files


def several(found: dict[str, set[str]]) -> list[str]:
    return sorted(name for name, where in found.items() if len(where) > 1)


def words() -> tuple[list[str], list[str]]:
    """The words of the table in docs/architecture.md, and those with several meanings."""
    text = (ROOT / "docs/architecture.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    rows = [row for row in re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE) if row[0] not in ("word", "---")]
    several_meanings = [
        word for word, meaning in rows if re.search(r"; (?:of|besides|in all other|between)\b", meaning)
    ]
    again = [stem for stem, times in Counter(stem_of(word) for word, _ in rows).items() if times > 1]
    return [word for word, _ in rows], several_meanings + again


def stem_of(word: str) -> str:
    """A word without its ending: what is told apart by that alone has several meanings."""
    return re.sub(r"(?:ed|ing|s)$", "", word)


def lines() -> int:
    """Lines of the package, the audit and the demo left out."""
    here = [path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).as_posix().startswith(LEFT_OUT)]
    return sum(len(path.read_text().splitlines()) for path in here)


def read_in_sources() -> dict[str, float]:
    classes, files = rooms()
    every_word, ambiguous = words()
    figures: dict[str, float] = {
        f"files besides its own: {part}": len(files_of_a_part(title)) for part, title in PARTS.items()
    }
    figures |= {
        "files that mention an op": files_that_mention(fields_of("Op")),
        "files that mention a sampling parameter": files_that_mention(fields_of("Sampling")),
        "files that mention an option of the executor": files_that_mention(fields_of("Options")),
        "class names in several rooms": len(several(classes)),
        "file names in several rooms": len(several(files)),
        "words": len(every_word),
        "words with several meanings": len(ambiguous),
        "lines": lines(),
    }
    return figures


# ---------------------------------------------------------------- the table


def record_all(folder: Path, names: bool) -> dict[str, float]:
    paths, found = Paths(Path(os.environ[_recorder.FOLDER])), {}
    for record in (record_calls, record_requests, record_cluster):
        found |= record(paths, folder)
    if names:
        for path, functions in found.items():
            print(f"\n{path}")
            for file, function in sorted(functions):
                print(f"  {file} {function}")
    return {f"functions: {path}": len(functions) for path, functions in found.items()}


def main() -> int:

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the functions of each path")
    parser.add_argument("--static", action="store_true", help="only what is read in the sources")
    options = parser.parse_args()
    if not options.static and _recorder.FOLDER not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, **_recorder.environment(Path(folder)), "XDG_RUNTIME_DIR": folder}
            raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    figures = {}
    if not options.static:
        with tempfile.TemporaryDirectory() as folder:
            figures = record_all(Path(folder), options.names)
    report = Report("paths")
    for name, figure in (figures | read_in_sources()).items():
        if name in GOALS:
            report.bar(name, figure, "<=", GOALS[name])
        else:
            report.figure(name, figure)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
