"""PEFT's own tests on split models: each runs unsplit, wrapped, and wrapped with reads allowed, and what it computes is compared bit by bit.

Run from the repository root (hours for all of it on two cores, a minute for --quick; `--shard 3/50` takes every fiftieth test):
    python scripts/compat_suites.py --fetch --quick
    python scripts/compat_suites.py --shard 3/50 -k 'not fsdp'

The tests are those of the installed PEFT, from its source distribution, which --fetch downloads into a cache outside of the repository
($SYMBIOSIS_SUITES_CACHE, else ~/.cache/symbiosis/suites). The models that they ask the hub for are tiny ones, built here from
configurations (scripts/_suites_hub.py); how a test is run is in scripts/_suites_plugin.py. (transformers' source distribution
has no generation tests: scripts/compat_models.py and tests/test_features.py generate.) Outcomes of a test that passes unsplit:

    equal    all outputs and gradients are equal, bit for bit
    close    within 1e-4 of each tensor's largest value, of a method that is computed in another way (DoRA, W + delta, trained biases)
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
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from symbiosis.errors import ConfigError
from symbiosis.reporting import Report, print_table

SCRIPTS = Path(__file__).parent
CACHE = Path(os.environ.get("SYMBIOSIS_SUITES_CACHE", Path.home() / ".cache" / "symbiosis" / "suites"))
WAYS = ("wrapped", "reads")
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
            _download("parameterized")  # which some of the tests import
        with tarfile.open(archive) as tar:
            tar.extractall(CACHE, filter="data")
        for wheel in CACHE.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(CACHE / "packages")
        (folder / "tests" / "__init__.py").touch()
    return folder


def _download(*what: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), *what]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"cannot download {what[-1]}: {done.stderr.strip()[-500:]}")


def hub(folder: Path) -> Path:
    """A hub cache of tiny models under the names that the tests ask for."""
    from _suites_hub import fill, names_in

    home = CACHE / f"hub-{transformers.__version__}"
    fill(home / "hub", names_in(folder / "tests"))
    return home


def run(folder: Path, home: Path, files: Sequence[str], only: str, shard: str, seconds: float | None) -> list[Result]:
    """What each test gave. Each file runs in a process of its own, so that one that dies costs the others nothing."""
    out = CACHE / f"results-{os.getpid()}.jsonl"
    out.unlink(missing_ok=True)
    paths = [str(path) for path in (SCRIPTS.parent, SCRIPTS, CACHE / "packages")]
    told = {"SYMBIOSIS_SUITES_OUT": str(out), "SYMBIOSIS_SUITES_SHARD": shard, "PYTHONPATH": os.pathsep.join(paths)}
    environment = os.environ | told | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for file in files:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "_suites_plugin",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "-q",
            "--no-header",
        ]
        command += ["-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning", f"tests/{file}.py"]
        command += ["-k", only] if only else []
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
            if done.returncode not in (0, 1, 5):  # passed, failed, nothing collected
                print(f"{file}: {done.stdout.strip()[-300:]}", file=sys.stderr)
        except subprocess.TimeoutExpired:
            print(f"{file}: ended after {seconds:g} s", file=sys.stderr)
    results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    out.unlink(missing_ok=True)
    return results


# ---------------------------------------------------------------- the report


def show(results: list[Result]) -> None:
    rows = [(kind, *(count(results, way)[kind] for way in WAYS)) for kind in sorted(count(results, *WAYS))]
    print_table(("outcome", *WAYS), rows, title="PEFT's tests on split models")
    reasons = Counter(
        (way, found["kind"], found["why"].splitlines()[0][:160] if found["why"] else "")
        for found, way in ((result[way], way) for result in results for way in WAYS if way in result)
        if found["kind"] in ("silent", "unclear") or (way == "reads" and found["kind"] == "refused")
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
    reads = count(results, "reads")
    tried = reads.total() - reads["nothing to serve"]
    made.bar("tried", tried, ">=", 1)
    made.bar("silent", both["silent"], "<=", 0)
    made.bar("unclear_errors", both["unclear"], "<=", 0)
    made.bar("share_refused_with_reads", reads["refused"] / max(1, tried), "<=", SHARE_REFUSED)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="download PEFT's source if it is not in the cache")
    parser.add_argument("--quick", action="store_true", help="a few dozen tests")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="NAME", help="test files without .py")
    parser.add_argument("-k", dest="only", default="", help="as pytest takes it")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th test of each file, from the I-th on")
    parser.add_argument(
        "--seconds", type=float, help="that a file may take; what it has not run by then is not counted"
    )
    parser.add_argument(
        "--results", nargs="+", type=Path, metavar="FILE", help="results of other runs, to report on together"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where to keep the results of this run")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if chosen.results:
        results = [json.loads(line) for file in chosen.results for line in file.read_text().splitlines()]
    else:
        folder = suite(chosen.fetch)
        files, only, shard = (
            ([QUICK[0]], QUICK[2], QUICK[3]) if chosen.quick else (chosen.files, chosen.only, chosen.shard)
        )
        results = run(folder, hub(folder), files, only, shard, chosen.seconds)
        if chosen.keep:
            chosen.keep.write_text("".join(json.dumps(result) + "\n" for result in results))
    show(results)
    return report(results).finish()


if __name__ == "__main__":
    sys.exit(main())
