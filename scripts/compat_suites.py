"""PEFT's own tests on split models: each runs unsplit, wrapped, with reads allowed, and with mapped weights, and what it computes is compared bit
by bit.

Run from the repository root (an hour or more for all of it, a minute for --quick; `--shard 3/50` takes a fiftieth of the tests, drawn by name):
    python scripts/compat_suites.py --fetch --quick
    python scripts/compat_suites.py --shard 3/50 -k 'not fsdp'

The tests are those of the installed PEFT, from its source distribution, which --fetch downloads into a cache outside of the repository
($SYMBIOSIS_SUITES_CACHE, else ~/.cache/symbiosis/suites). The models that they ask the hub for are tiny ones, built here from
configurations (scripts/_suites_hub.py); how a test is run is in scripts/_suites_plugin.py. (transformers' source distribution
has no generation tests: scripts/compat_models.py and tests/inproc/test_equality.py generate.) Outcomes of a test that passes unsplit:

    equal    all outputs and gradients are equal, bit for bit
    close    within 1e-4 of each tensor's largest value (or 1e-6 of the largest of all: gradients that are zero but for roundings),
             of what is computed in another way (DoRA, W + delta, transposed rows; where reads are allowed, trained biases only;
             where weights are mapped, nothing); of numbers of half the width, within four of their roundings
    partial  an assertion about a state dict, which has only what the client owns where reads are not allowed
    named    an assertion about the name of a layer's class in a message, which is ours
    refused  an error of Symbiosis says why
    unclear  an error that is not ours, or an assertion of the test
    silent   a difference that nobody would have noticed

Models with nothing to serve (convolutions, heads) and tests that fail or are skipped unsplit are counted, and prove nothing.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from symbiosis.base.procs import python
from symbiosis.base.reporting import Report, print_table
from symbiosis.errors import ConfigError

SCRIPTS = Path(__file__).parent
CACHE = Path(os.environ.get("SYMBIOSIS_SUITES_CACHE", Path.home() / ".cache" / "symbiosis" / "suites"))
WAYS = ("wrapped", "reads", "mapped")
SHARE_REFUSED = 0.03
FILES = (
    "test_custom_models", "test_decoder_models", "test_encoder_decoder_models", "test_feature_extraction_models",
    "test_seq_classifier", "test_token_classification_qa", "test_initialization", "test_lora_variants", "test_mixed",
    "test_other", "test_target_parameters", "test_trainable_tokens", "test_tuners_utils", "test_adaption_prompt",
    "test_low_level_api", "test_multitask_prompt_tuning", "test_cpt", "test_vera", "test_pvera", "test_randlora",
    "test_shira", "test_vblora", "test_unilora", "test_osf", "test_frod", "test_deft", "test_boft", "test_bdlora",
    "test_supertuning", "test_velora", "test_xlora", "test_arrow", "test_poly", "test_lora_conversion", "test_cartridge",
    "test_lora_ga", "test_loraplus", "test_lorafa", "test_shadow", "test_helpers",
)  # fmt: skip
QUICK = ("test_custom_models", "-k", "test_forward_output_finite or test_training_custom_models_with_merging", "0/25")
PYTEST = (
    "-p", "no:cacheprovider", "-o", "addopts=", "-q", "--no-header", "--timeout", "900",
    "--tb", "no",  # half of the time went into finding the source lines of refusals
    "-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning",
)  # fmt: skip
Result = dict[str, Any]


# ---------------------------------------------------------------- the suite


def suite(fetch: bool) -> Path:
    """The folder of the installed PEFT's source; what is missing is downloaded if that is wanted."""
    release = importlib.metadata.version("peft")
    folder, archive = CACHE / f"peft-{release}", CACHE / f"peft-{release}.tar.gz"
    if not folder.exists():
        if not fetch and not archive.exists():
            raise ConfigError(
                f"no {folder}: run with --fetch, which downloads peft {release} and its tests from the index"
            )
        CACHE.mkdir(parents=True, exist_ok=True)
        if not archive.exists():
            _download("--no-binary", ":all:", "--no-build-isolation", f"peft=={release}")
            _download("parameterized", "scipy", "attrs")  # which some of the tests import
        with tarfile.open(archive) as tar:
            tar.extractall(CACHE, filter="data")
        for wheel in CACHE.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(CACHE / "packages")
        (folder / "tests" / "__init__.py").touch()
    return folder


def _download(*what: str) -> None:
    command = python("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), *what)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"cannot download {' '.join(what)}: {done.stderr.strip()[-500:]}")


def hub(folder: Path) -> Path:
    """A hub cache of tiny models under the names that the tests ask for."""
    from _suites_hub import fill, names_in

    home = CACHE / f"hub-{transformers.__version__}"
    fill(home / "hub", names_in(folder / "tests"))
    return home


def run(folder: Path, home: Path, files: Sequence[str], only: str, shard: str, seconds: float, out: Path) -> None:
    """Append to `out` what each test gave of which there is no result in it yet. One process runs all of them, because importing
    and collecting take as long as some hundred tests; if it dies, another one goes on after the test that it died of."""
    under_way, end = out.with_suffix(".under-way"), time.monotonic() + seconds
    environment = _environment(home) | {
        "SYMBIOSIS_SUITES_OUT": str(out),
        "SYMBIOSIS_SUITES_UNDER_WAY": str(under_way),
        "SYMBIOSIS_SUITES_SHARD": shard,
    }
    command = python("-m", "pytest", "-p", "_suites_plugin", *PYTEST, *(f"tests/{file}.py" for file in files))
    command += ["-k", only] if only else []
    while True:
        under_way.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=end - time.monotonic()
            )
        except subprocess.TimeoutExpired:
            print(f"ended after {seconds:g} s", file=sys.stderr)
            break
        if done.returncode in (0, 1, 5):  # passed, failed, nothing collected
            break
        print((done.stdout + done.stderr).strip()[-500:], file=sys.stderr)
        if not under_way.exists():
            break
        died = {"kind": "unclear", "why": f"the process ended with {done.returncode}"}
        _append(out, {"test": under_way.read_text(), "wrapped": died})
    under_way.unlink(missing_ok=True)


def _environment(home: Path) -> dict[str, str]:
    paths = [str(path) for path in (SCRIPTS.parent, SCRIPTS, CACHE / "packages")]
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    told = {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | told


def _append(out: Path, result: Result) -> None:
    with out.open("a") as lines:
        lines.write(json.dumps(result) + "\n")


def read(files: Sequence[Path]) -> list[Result]:
    """The results that are in files, the last one of each test."""
    found = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return list({result["test"]: result for result in found}.values())


# ---------------------------------------------------------------- the report


def show(results: list[Result]) -> None:
    rows = [(kind, *(count(results, way)[kind] for way in WAYS)) for kind in sorted(count(results, *WAYS))]
    print_table(("outcome", *WAYS), rows, title="PEFT's tests on split models")
    reasons = Counter(
        (way, found["kind"], found["why"].splitlines()[0][:160] if found["why"] else "")
        for found, way in ((result[way], way) for result in results for way in WAYS if way in result)
        if found["kind"] in ("silent", "unclear") or (way != "wrapped" and found["kind"] == "refused")
    )
    for (way, kind, why), number in reasons.most_common(40):
        print(f"{number} {way}, {kind}: {why}")
    for result in results:
        for way in WAYS:
            if result.get(way, {}).get("kind") in ("silent", "unclear"):
                print(f"{way}, {result[way]['kind']}: {result['test']}")


def count(results: list[Result], *ways: str) -> Counter[str]:
    return Counter(result[way]["kind"] for result in results for way in ways if way in result)


def report(results: list[Result]) -> Report:
    made = Report("compat_suites")
    made.figure("tests", len(results))
    made.figure("tests_not_here", sum("not_here" in result for result in results))
    both = count(results, *WAYS)
    for way in WAYS:
        for kind, number in sorted(count(results, way).items()):
            made.figure(f"{way}_{kind.replace(' ', '_')}", number)
    for way in WAYS[1:]:
        kinds = count(results, way)
        tried = kinds.total() - kinds["nothing to serve"]
        made.bar(f"{way}_tried", tried, ">=", 1)
        made.bar(f"share_refused_with_{way}", kinds["refused"] / max(1, tried), "<=", SHARE_REFUSED)
    made.bar("silent", both["silent"], "<=", 0)
    made.bar("unclear_errors", both["unclear"], "<=", 0)
    return made


def collect(chosen: argparse.Namespace) -> list[Result]:
    """The results of a run."""
    folder = suite(chosen.fetch)
    files, only, shard = ([QUICK[0]], QUICK[2], QUICK[3]) if chosen.quick else (chosen.files, chosen.only, chosen.shard)
    with tempfile.TemporaryDirectory() as scratch:
        out = (chosen.keep or Path(scratch) / "results.jsonl").absolute()
        run(folder, hub(folder), files, only, shard, chosen.seconds, out)
        return read([out])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="download PEFT's source if it is not in the cache")
    parser.add_argument("--quick", action="store_true", help="a few dozen tests")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="NAME", help="test files without .py")
    parser.add_argument("-k", dest="only", default="", help="as pytest takes it")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="the I-th of N parts, drawn by the tests' names")
    parser.add_argument(
        "--seconds", type=float, default=86400, help="for all of it; what has not run by then is not counted"
    )
    parser.add_argument(
        "--results", nargs="+", type=Path, metavar="FILE", help="results of other runs, to report on together"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="where to keep the results; tests of which it has one are not run again",
    )
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = read(chosen.results) if chosen.results else collect(chosen)
    show(results)
    return report(results).finish()


if __name__ == "__main__":
    sys.exit(main())
