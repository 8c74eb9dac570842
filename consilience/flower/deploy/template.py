"""`consilience deploy init`: a Flower app that works as it is, to be changed in one file."""

from __future__ import annotations

from pathlib import Path

from consilience.core.settings import Invalid
from consilience.flower.deploy.settings import CONFIG, FEDERATION
from consilience.runs.names import safe_name

PROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation run by consilience"
license = {{ text = "proprietary" }}
dependencies = ["consilience[flower]"]

[tool.flwr.app]
publisher = "{publisher}"
fab-include = ["/*.py", "/*.toml"{more}]  # what is sent to the nodes: never runs, keys or data

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
runs = "runs"     # where the server writes the run folder
settings = ""     # overrides of config.toml, such as "rounds=20 algorithm.lr=0.05"; both sides see them
cases = ""
insecure = false  # true: run also where the connection is not known to be encrypted
"""

SERVER = '''\
"""What runs at the server: see config.toml for the settings, federation.py for the model."""

from pathlib import Path

from consilience.flower.deploy.serving import server_app

app = server_app(Path(__file__).parent)
'''

CLIENT = '''\
"""What runs at each client: see federation.py for the model and the rows."""

from pathlib import Path

from consilience.flower import client_app

app = client_app(Path(__file__).parent)
'''

CONFIG_TEXT = """\
# The settings of the run, the same on both sides. `consilience list` shows algorithms and their options.
name = "{name}"
seed = 0
rounds = 3

[algorithm]
name = "simprox"
lr = 0.2
epochs = 1
batch_size = 16
selection = "everyone"

[engine]
dtype = "float32"

[deploy]
clients = {clients}      # in the whole federation: SuperNodes say which they are (--node-config "clients=0")
classes = 10     # of the targets; leave it out in a regression
deadline = 600   # seconds for a whole reply; slower clients are left out of the round
wait = 300       # seconds for enough clients to connect
# secure_aggregation = true   # experimental: the server sees only the sum of the replies (fedavg and its like)
"""

FEDERATION_TEXT = '''\
"""What is learned, and from what: the only file to change. Both sides have a copy; rows stay where they are."""

import torch
from torch import nn


def model() -> nn.Module:
    """The model. It is built on both sides, from the same seed."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data(client: int, node: dict) -> tuple:
    """This client's own rows: (x, y), or (x, y, test_x, test_y) if it can test. Called at the client only.

    `node` is what its SuperNode was started with, so each client has its own path:
    --node-config "clients=0 data=/srv/hospital" gives node["data"].
    """
    from sklearn.datasets import load_digits  # an example that needs no files: a share of the digits for each client

    pixels, labels = load_digits(return_X_y=True)
    mine = (labels + 3 * client) % 10 < 6  # six of ten classes
    x = torch.tensor(pixels[mine], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels[mine])
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def test() -> tuple | None:
    """Rows (x, y) that the server may test on; None: clients test on their own rows, and say how many were right."""
    return None
'''

IGNORE = "local/\nruns/\nkeys/\n__pycache__/\n"


def project(name: str, publisher: str = "consilience", more: str = "") -> str:
    """The pyproject.toml of an app; `more` are patterns of further files that nodes need."""
    return PROJECT.format(name=name, publisher=publisher, more=f', "{more}"' if more else "")


def init(folder: Path, *, clients: int = 4, publisher: str = "consilience") -> list[Path]:
    """Write a ready Flower app into a new folder; the files."""
    name = safe_name(Path(folder).name, "the app's name")
    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise Invalid(f"{folder} is not empty: name a folder that does not exist yet")
    files = {
        "pyproject.toml": project(name, publisher),
        "server_app.py": SERVER,
        "client_app.py": CLIENT,
        CONFIG: CONFIG_TEXT.format(name=name, clients=clients),
        FEDERATION: FEDERATION_TEXT,
        ".gitignore": IGNORE,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    written = []
    for file, text in files.items():
        path = Path(folder) / file
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
