"""Exported models, loaded again by the programs they are for, give what the trained module gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_tiny
from torch import Tensor, nn

import consilience as cs
from consilience.core.settings import Invalid
from consilience.runs.model_formats import write_model
from consilience.runs.result import Result
from consilience.task.task import Task

NAMES = ("send", "card", "rate")


def result_of(module: nn.Module, example: Any) -> Result:
    """A result whose trained values are not the module's own."""
    task, draw = Task(module), torch.Generator().manual_seed(1)
    values = task.start()
    values["params"] = {
        name: value + 0.1 * torch.randn(value.shape, generator=draw) for name, value in values["params"].items()
    }
    return Result(task=task, values=values, history=[], example=example, label_names=NAMES)


def picture_model() -> tuple[Result, Tensor, Tensor]:
    rows = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    result = result_of(cs.build_model("cnn", (1, 8, 8), 3), rows[:2])
    return result, rows, result.model(rows).detach()


def text_model(train: str) -> tuple[Result, dict[str, Tensor], Tensor]:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'consilience[text]'")
    pytest.importorskip("peft", reason="needs peft: pip install 'consilience[text]'")
    module: Any = transformers_tiny.model("bert", train)
    rows = module.tokenize(transformers_tiny.texts(5)[0])
    result = result_of(module, {name: value[:2] for name, value in rows.items()})
    output = result.model(rows).detach()
    assert float(output.std(0).max()) > 0.1  # it depends on the text
    return result, rows, output


def run_onnx(file: Path, rows: Any) -> Tensor:
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'consilience[onnx]'")
    given = [value.numpy() for value in (rows.values() if isinstance(rows, dict) else [rows])]
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file))
        return torch.from_numpy(session.run(None, dict(zip((i.name for i in session.get_inputs()), given)))[0])
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        loaded = onnx.load(str(file))
        names = [put.name for put in loaded.graph.input]
        return torch.from_numpy(ReferenceEvaluator(loaded).run(None, dict(zip(names, given)))[0])


@pytest.mark.parametrize("make", [picture_model, lambda: text_model("lora")], ids=["cnn", "bert"])
def test_torch_export(tmp_path: Path, make: Any) -> None:
    result, rows, expected = make()
    file = result.export(tmp_path, "torch-export")
    again = torch.export.load(file).module()
    assert torch.allclose(again(rows), expected, atol=1e-5)  # five rows, recorded on two
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["classes"] == list(NAMES) and about["any_number_of_rows"] and about["kind"] == "classification"


@pytest.mark.slow  # the exporter takes ten seconds to import
@pytest.mark.parametrize("make", [picture_model, lambda: text_model("lora")], ids=["cnn", "bert"])
def test_onnx(tmp_path: Path, make: Any) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'consilience[onnx]'")
    result, rows, expected = make()
    file = result.export(tmp_path, "onnx")
    assert torch.allclose(run_onnx(file, rows), expected, atol=1e-4)


def test_safetensors_is_the_whole_state(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    result, rows, expected = text_model("lora")
    file = result.export(tmp_path)
    fresh = transformers_tiny.model("bert", "lora", seed=5)
    load_model(fresh, str(file))
    assert torch.equal(fresh.eval()(rows), expected)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_hugging_face_folder(tmp_path: Path, train: str) -> None:
    result, rows, expected = text_model(train)
    result.export(tmp_path, "hugging_face")
    import transformers

    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.allclose(again(**rows).logits, expected, atol=1e-4)
    assert again.config.id2label == dict(enumerate(NAMES))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = transformers_tiny.texts(1)[0][0]
    own: Any = result.task.module
    assert tokenizer(text)["input_ids"] == own.tokenize([text])["input_ids"][0].tolist()


def test_separate_adapters_are_pefts(tmp_path: Path) -> None:
    result, rows, expected = text_model("lora")
    result.export(tmp_path, "hugging_face", adapters="separate")
    from peft import PeftModel

    base: Any = transformers_tiny.model("bert", "all")  # the same seed: the same frozen weights
    again = PeftModel.from_pretrained(base.core, str(tmp_path)).eval()
    assert torch.allclose(again(**rows).logits, expected, atol=1e-5)
    adapters = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert adapters < 4 * sum(p.numel() for p in base.parameters()) / 2
    assert not (tmp_path / "model.safetensors").exists()


def test_refused(tmp_path: Path) -> None:
    module = cs.build_model("mlp", (4,), 3)
    with pytest.raises(Invalid, match=r"'onx' is not one of .*did you mean 'onnx'"):
        write_model(module, tmp_path, "onx")
    with pytest.raises(Invalid, match=r"give some as example="):
        write_model(module, tmp_path, "onnx")
    with pytest.raises(Invalid, match="is no model of Hugging Face"):
        write_model(module, tmp_path, "hugging_face")
    with pytest.raises(Invalid, match="adapters = 'no'"):
        write_model(module, tmp_path, "safetensors", adapters="no")
