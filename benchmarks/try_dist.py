"""Install the wheel of a folder into a fresh environment and use it there, without the repository.

    python benchmarks/try_dist.py dist

The environment and the runs are in a temporary folder. The versions are those of constraints.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINED = """
import consilience as cs, torch
assert "site-packages" in cs.__file__, cs.__file__
x = torch.randn(60, 4); y = (x.sum(1) > 0).long()
federation = cs.Federation.from_clients([(x[k::3], y[k::3]) for k in range(3)], test=(x, y))
result = cs.train(torch.nn.Linear(4, 2), federation, cs.fedavg(lr=0.5), rounds=3, progress=False)
print(f"consilience {cs.__version__} from a wheel: accuracy {result.history[-1]['accuracy']:.2f}")
"""


def main(folder: Path) -> int:
    """Make the environment, install, run the command line and ten lines of Python."""
    wheels = sorted(folder.resolve().glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"{folder} should hold one wheel, but has {len(wheels)}: run `make dist`")
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        call([sys.executable, "-m", "venv", str(here / "env")], here)
        python = here / "env" / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        limits = ["-c", str(ROOT / "constraints.txt")]
        call([*pip, *limits, "torch"], here)
        call([*pip, *limits, f"{wheels[0]}[report]"], here)
        command = str(here / "env" / "bin" / "consilience")
        call([command, "run", "rounds=3", "--name", "first"], here)
        call([command, "show", "runs/first"], here)
        if not (here / "runs" / "first" / "report.html").exists():
            raise SystemExit("the run has left no report.html: are the templates in the wheel?")
        call([str(python), "-c", TRAINED], here)
    print("the wheel works without the repository")
    return 0


def call(command: list[str], folder: Path) -> None:
    """One command in a folder that has nothing to do with the repository."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=1200)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/try_dist.py DIST_FOLDER")
    raise SystemExit(main(Path(sys.argv[1])))
