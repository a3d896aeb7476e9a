"""`python -m symbiosis`: the `symbiosis` command, also from a checkout that is not installed."""

import os
import sys
from pathlib import Path

from symbiosis.cli.main import main

if __name__ == "__main__":
    checkout = str(Path(__file__).parents[1])
    if sys.path[0] == checkout:  # the working directory, from which children import nothing (`procs.python`)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    main()
