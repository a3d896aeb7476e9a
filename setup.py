"""The README as an index page shows it: its links into the repository lead nowhere there, so they become plain names. The commit that
a wheel or a source distribution is made of, by which builds can be told apart. And the line by which `SYMBIOSIS_RUN=1` reaches every program."""

import importlib.util
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A line that Python runs whenever it starts: where SYMBIOSIS_RUN is set, it has a program's models share (symbiosis/run/hook.py).
PTH = "import os; os.environ.get('SYMBIOSIS_RUN', '') not in ('', '0') and __import__('symbiosis.run.hook').run.hook.install()\n"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def stamp(package: Path) -> None:
    """Write the commit into a copy of the package, if it is known."""
    spec = importlib.util.spec_from_file_location("build_of_symbiosis", ROOT / "symbiosis" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if commit := module.commit():
        (package / "commit.txt").unlink(missing_ok=True)  # it may be a link to the file of the checkout
        (package / "commit.txt").write_text(f"{commit}\n")


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        packages = Path(self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib)
        (packages / "symbiosis_run.pth").write_text(PTH)
        if not self.editable_mode:  # else it is the checkout itself
            stamp(Path(self.build_lib) / "symbiosis")


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        stamp(Path(base_dir) / "symbiosis")


setup(
    long_description=LINK.sub(
        lambda link: f"{link[1]} (`{link[2]}`)" if link[2] not in link[1] else f"`{link[1]}`", README
    ),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
)
