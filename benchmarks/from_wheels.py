"""Measure the kernels of opfuse on a machine with a GPU and no network.

Run it in the folder of wheels that ``python -m nox -s wheelhouse`` makes, with a Python that has
torch and Triton:

    python from_wheels.py [options of python -m opfuse_triton gpu]

It installs opfuse and every package next to it from this folder, and then runs
``python -m opfuse_triton gpu``, which writes ``gpu.json`` and a table of configurations.
"""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def commands(folder: pathlib.Path, options: list[str]) -> list[list[str]]:
    """The commands that install the wheels of a folder and measure.

    Args:
        folder: Where the wheels are.
        options: Of ``python -m opfuse_triton gpu``.

    Raises:
        SystemExit: There is no wheel of opfuse.
    """
    wheels = sorted(folder.glob("*.whl"))
    own = [str(wheel) for wheel in wheels if wheel.name.startswith("opfuse")]
    others = [wheel.name.partition("-")[0] for wheel in wheels if str(wheel) not in own]
    if not own:
        raise SystemExit(f"{folder} has no wheel of opfuse: python -m nox -s wheelhouse packs them")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    return [
        # what is there already, in whatever version, stays
        *[[*pip, "--find-links", str(folder), *others]] * bool(others),
        [*pip, "--force-reinstall", *own],
        [sys.executable, "-m", "opfuse_triton", "gpu", *options],
    ]


if __name__ == "__main__":
    *installing, measuring = commands(HERE, sys.argv[1:])
    for command in installing:
        subprocess.run(command, check=True)
    sys.exit(subprocess.run(measuring, check=False).returncode)
