"""Models of torchvision and timm by name; where a package is not installed, a stand-in with its interface is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import consilience as cs
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.task.task import Task

NETWORK = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self, channels, classes, width=4):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3)
        self.norm, self.act = nn.BatchNorm2d(width, eps=0.01), nn.ReLU(inplace=True)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, classes))

    def forward(self, x):
        return self.classifier(self.act(self.norm(self.stem(x))).mean((2, 3)))
"""
STUBS = {
    "torchvision/__init__.py": "from torchvision import models",
    "torchvision/models.py": NETWORK
    + """
def list_models(module=None):
    return ["mobilenet_v3_small", "resnet18"]

def get_model(name, weights=None, num_classes=1000, **options):
    return Network(1, 1000 if weights else num_classes, **options)
""",
    "timm/__init__.py": NETWORK
    + """
def list_models():
    return ["vit_tiny_patch16_224", "convnext_atto"]

def create_model(name, pretrained=False, num_classes=1000, in_chans=3, **options):
    return Network(in_chans, num_classes, **options)
""",
}


@pytest.fixture(params=["torchvision", "timm"])
def library(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, text in STUBS.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == request.param]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield request.param
    for name in [name for name in sys.modules if name.partition(".")[0] == request.param]:
        sys.modules.pop(name)


def architecture(library: str) -> str:
    return {"torchvision": "resnet18", "timm": "convnext_atto"}[library]


def test_by_name(library: str) -> None:
    for train, trained in (("all", 6), ("head", 2)):
        model: Any = cs.build_model(library, (1, 6, 6), 3, architecture=architecture(library), train=train).eval()
        x = torch.randn(4, 1, 6, 6)
        assert model(x).shape == (4, 3) and torch.equal(model.head(model.features(x)), model(x))
        assert sum(p.requires_grad for p in model.parameters()) == trained
        engines = (tiny.engine(lambda m=model: m, lane=lane) for lane in ("serial", "batched"))
        first, second = (list(run(cs.fedavg(lr=0.1, batch_size=4), engine, rounds=2, seed=1)) for engine in engines)
        assert tiny.gap(first[-1].model, second[-1].model) < 1e-12
    assert Task(model).frozen_digest


def test_a_pretrained_model_gets_a_head_for_these_classes(library: str) -> None:
    model = cs.build_model(library, (1, 6, 6), 5, architecture=architecture(library), pretrained=True)
    assert model(torch.randn(2, 1, 6, 6)).shape == (2, 5)
    wide: Any = cs.build_model(library, (1, 6, 6), 5, architecture=architecture(library), options={"width": 7})
    assert wide.head.in_features == 7


def test_refused(library: str) -> None:
    near = {"torchvision": "resnet81", "timm": "convnext_ato"}[library]
    with pytest.raises(Invalid, match=rf"{near!r} is no model of {library} \(did you mean"):
        cs.build_model(library, (1, 6, 6), 3, architecture=near)
    with pytest.raises(Invalid, match="is not a picture"):
        cs.build_model(library, (6,), 3, architecture=architecture(library))
    if library == "torchvision":
        with pytest.raises(Invalid, match="reads 1 channels, and the data have 3"):
            cs.build_model(library, (3, 6, 6), 3, architecture="resnet18")


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Invalid, match=f"not installed: pip install {name}"):
        cs.build_model(name, (1, 6, 6), 3, architecture="resnet18")


def test_nothing_is_imported_that_is_not_asked_for() -> None:
    heavy = ("transformers", "peft", "tokenizers", "torchvision", "timm", "onnx", "onnxscript")
    code = (
        "import sys, consilience as cs\n"
        "import consilience.models, consilience.experiments.assembly, consilience.runs.result\n"
        "cs.build_model('mlp', (4,), 3)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
