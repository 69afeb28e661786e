"""``python -m costmodel.autotune script.py ...`` or ``-m module ...``: a program, tuned by us."""

import runpy
import sys
from pathlib import Path

from costmodel.autotune.replace import replace_triton_autotune


def main() -> None:
    """Run a program in which costmodel tunes what ``triton.autotune`` would."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("expected a script or -m MODULE, such as: python -m costmodel.autotune train.py")
    replace_triton_autotune()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
