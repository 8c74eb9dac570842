"""Every CUDA lane gives the CPU's result; run on a machine with a GPU.

`-k first` selects what concerns the code whose results have not been compared on a GPU since 20 November 2026.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import sequence_layers
import torch
import torch.nn.functional as F

from consilience.algorithms import recipe
from consilience.core import conclusion, tree
from consilience.core.federation import Federation
from consilience.core.rounds import Round, run
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.lanes import captured
from consilience.engines.vectorised.lanes.captured import Captured
from consilience.engines.vectorised.lanes.cuda import GraphBatched
from consilience.experiments.client_tests import personal_test
from consilience.layers import attention, client_convolutions
from consilience.models import build
from consilience.selection import Uniform
from consilience.server.averaging.combining import coordinate_wise, krum
from consilience.task.task import Task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MODELS = {"cnn": {"dropout": 0.25}, "mlp": {}, "resnet18": {"stem": "cifar"}}
SIZES = (7, 12, 5, 20, 9, 64, 33, 1, 40, 41)  # unequal: short last batches, and groups that narrow


def _clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, 16, 16, generator=generator), torch.randint(0, 10, (n,), generator=generator)) for n in SIZES
    ]


def _federation() -> Federation:
    return Federation.from_clients(_clients())


def _train(model: str, algorithm: str, **engine: object) -> dict[str, dict[str, torch.Tensor]]:
    task = Task(build(model, inputs=(3, 16, 16), classes=10, **MODELS[model]))
    runs = Vectorised(task, _federation(), **engine)  # type: ignore[arg-type]
    # rounding errors grow with every step of a deep net on batches of eight: one short round is what can be compared
    rounds, options = (1, {"lr": 0.01}) if model == "resnet18" else (3, {"lr": 0.05, "epochs": 2, "momentum": 0.9})
    for done in run(recipe(algorithm)(batch_size=8, **options), runs, rounds=rounds):  # noqa: B007
        pass
    return {part: {name: value.cpu() for name, value in values.items()} for part, values in done.model.items()}


def _gap(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> float:
    return max(float((a[p][n].double() - b[p][n].double()).abs().max()) for p in a for n in a[p])


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    """The result of a model and an algorithm on the CPU, computed when it is asked for first."""
    return functools.cache(functools.partial(_train, device="cpu", dtype="float64", lane="serial"))


@pytest.mark.parametrize("algorithm", ["fedprox", "simprox"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
def test_float64_equals_the_cpu(lane, model, algorithm, on_cpu):
    assert _gap(_train(model, algorithm, device="cuda", dtype="float64", lane=lane), on_cpu(model, algorithm)) < 1e-12


def test_a_replayed_generator_equals_the_cpu():
    """FedGen's server records a step of its generator on a GPU and replays it."""
    on_gpu, on_cpu = (_train("mlp", "fedgen", device=name, dtype="float64", lane="batched") for name in ("cuda", "cpu"))
    assert _gap(on_gpu, on_cpu) < 1e-11


@pytest.mark.parametrize("lane", ["batched", "streams"])
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_compiled_float64_equals_the_cpu(lane, model, on_cpu):
    compiled = _train(model, "fedprox", device="cuda", dtype="float64", lane=lane, compile=True)
    assert _gap(compiled, on_cpu(model, "fedprox")) < 1e-12


@pytest.mark.parametrize("lane", ["batched", "streams"])
@pytest.mark.parametrize("model", list(MODELS))
def test_float32_repeats_bit_for_bit_and_is_near(lane, model, on_cpu):
    once, again = (_train(model, "fedprox", device="cuda", lane=lane) for _ in range(2))
    assert _gap(once, again) == 0
    exact = on_cpu(model, "fedprox")["params"]
    apart = sum(float((once["params"][n].double() - v).square().sum()) for n, v in exact.items())
    assert (apart / sum(float(v.square().sum()) for v in exact.values())) ** 0.5 < (
        1e-2 if model == "resnet18" else 1e-4
    )


@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_models_of_their_own_are_trained_and_tested_as_on_the_cpu(lane):
    rows = [(x[: len(x) // 2 + 1], y[: len(x) // 2 + 1]) for x, y in _clients()]
    federation = Federation.from_clients(_clients(), client_tests=rows)
    values = {}
    for device in ("cpu", "cuda"):
        task = Task(build("cnn", inputs=(3, 16, 16), classes=10))
        way = lane if device == "cuda" else "serial"
        engine = Vectorised(task, federation, device=device, dtype="float64", lane=way)
        algorithm = recipe("fedswap")(batch_size=8, lr=0.05, optimiser="adam", h1=2, h2=3)
        test = personal_test(algorithm, engine)
        assert test is not None
        for done in run(algorithm, engine, rounds=2):  # noqa: B007
            pass
        values[device] = test(done.snapshot.server).loss
    assert abs(values["cpu"] - values["cuda"]).max() < 1e-10


def _sequences(name: str, **engine: object) -> dict[str, dict[str, torch.Tensor]]:
    runs = Vectorised(Task(sequence_layers.model(name)), sequence_layers.federation(), **engine)  # type: ignore[arg-type]
    for done in run(recipe("fedprox")(batch_size=4, lr=0.05, epochs=2), runs, rounds=2, seed=1):  # noqa: B007
        pass
    return {part: {key: value.cpu() for key, value in values.items()} for part, values in done.model.items()}


@pytest.mark.parametrize("name", list(sequence_layers.MODELS))
def test_recurrent_layers_attention_and_draws_equal_the_cpu(name):
    expected = _sequences(name, device="cpu", dtype="float64", lane="serial")
    for lane in ("serial", "batched", "streams"):
        assert _gap(_sequences(name, device="cuda", dtype="float64", lane=lane), expected) < 1e-10, lane


@pytest.mark.parametrize("name", ["LSTM, dropout", "encoder", "draws"])
@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_draws_repeat_bit_for_bit(lane, name):
    torch.cuda.manual_seed(1)
    once = _sequences(name, device="cuda", lane=lane)
    torch.cuda.manual_seed(2)
    assert _gap(once, _sequences(name, device="cuda", lane=lane)) == 0


@pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
def test_attention_over_long_texts_in_bf16_repeats_to_the_bit(lane: str) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randint(5, 60, (8, 300), generator=draw), torch.arange(8) % 3) for _ in range(3)]
    config = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {"config": {**config, "intermediate_size": 64}, "length": 300, "vocabulary": 64}

    def trained() -> dict[str, torch.Tensor]:
        task = Task(build("hugging_face", inputs=(300,), classes=3, **options))
        runs = Vectorised(task, Federation.from_clients(clients), device="cuda", precision="bf16", lane=lane)
        *_, done = run(recipe("fedavg")(batch_size=4, lr=0.1), runs, rounds=2)
        return done.model["params"]

    first, second = trained(), trained()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def _rounds(algorithm: str, lane: str, rounds: int, resume: Any = None, **engine: object) -> list[Round]:
    task = Task(build("cnn", inputs=(3, 16, 16), classes=10))
    runs = Vectorised(task, _federation(), device="cuda", lane=lane, **engine)  # type: ignore[arg-type]
    rule = recipe(algorithm)(batch_size=8, lr=0.05, selection=Uniform(count=6))
    return list(run(rule, runs, rounds=rounds, seed=1, resume=resume))


def _same(one: Round, other: Round) -> bool:
    pairs = [(one.model, other.model), (tree.here(one.snapshot.memory), tree.here(other.snapshot.memory))]
    return all(
        torch.equal(a, b) for x, y in pairs for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True)
    ) and np.array_equal(one.snapshot.losses.dense(), other.snapshot.losses.dense(), equal_nan=True)


@pytest.mark.parametrize("lane", ["serial", "batched", "streams"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ditto", "fedgen"])
def test_a_resumed_run_has_the_same_bits(lane, algorithm):
    """Functions around training are traced at their seventh call, at another round in a resumed run."""
    whole = _rounds(algorithm, lane, 10)
    rest = _rounds(algorithm, lane, 10, resume=whole[4].snapshot)
    assert all(_same(one, other) for one, other in zip(whole[5:], rest, strict=True))


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn", "fedadam", "fedgen"])
def test_first_one_wait_a_round_and_prepared_batches_change_no_bit(monkeypatch, algorithm):
    early = _rounds(algorithm, "batched", 4)
    monkeypatch.setattr(conclusion, "_on_gpu", lambda cohort: False)
    monkeypatch.setattr(Vectorised, "prepares_ahead", property(lambda self: False))
    assert all(_same(one, other) for one, other in zip(early, _rounds(algorithm, "batched", 4), strict=True))


@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_rows_and_memories_elsewhere_change_no_bit(lane):
    near = _rounds("scaffold", lane, 4)
    for where in ({"rows": "host"}, {"memory": "host"}, {"memory": "file"}):
        far = _rounds("scaffold", lane, 4, **where)
        assert all(_same(one, other) for one, other in zip(near, far, strict=True)), where


@pytest.mark.parametrize("lane", ["batched", "streams"])
def test_memory_that_runs_out_halves_the_groups(monkeypatch, lane):
    replay, left = Captured.replay, [3]

    def short(self: Captured, **how: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("out of memory")
        replay(self, **how)

    expected = _rounds("scaffold", lane, 2, dtype="float64", clients_at_once=3)
    monkeypatch.setattr(Captured, "replay", short)
    got = _rounds("scaffold", lane, 2, dtype="float64", clients_at_once=6)
    assert left[0] < 0 and _gap(got[-1].model, expected[-1].model) < 1e-12


def test_a_lane_that_failed_gives_its_memory_back(monkeypatch):
    held = []

    def fold(self: GraphBatched, program: Any, carry: Any, *rest: Any) -> Any:
        held.append(weakref.ref(next(tree.leaves(carry))))
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(GraphBatched, "fold", fold)
    with pytest.warns(UserWarning, match="cannot run this model"):
        _rounds("fedavg", "auto", 1)
    assert held and all(one() is None for one in held)


def _in_precision(precision: str, **engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    task = Task(build("cnn", inputs=(3, 16, 16), classes=10))
    options = {"device": "cuda", "lane": "batched-matmul", "precision": precision, **engine}
    *_, done = run(
        recipe("fedprox")(batch_size=8, lr=0.05, epochs=2), Vectorised(task, _federation(), **options), rounds=2
    )
    return {part: {name: value.cpu() for name, value in values.items()} for part, values in done.model.items()}


def _apart(model: dict[str, dict[str, torch.Tensor]], exact: dict[str, dict[str, torch.Tensor]]) -> float:
    apart = sum(float((model["params"][n].double() - v).square().sum()) for n, v in exact["params"].items())
    return (apart / sum(float(v.square().sum()) for v in exact["params"].values())) ** 0.5


@pytest.mark.parametrize("compile", [False, True])
def test_first_convolutions_by_kernels_repeat_and_are_as_near_the_exact_ones_as_those_of_torch(compile: bool) -> None:
    exact = _in_precision("full", dtype="float64")
    once, again = (_in_precision("tf32", compile=compile) for _ in range(2))
    assert any(name.endswith("convolution_kernels") for name in sys.modules), "the kernels were not used"
    assert _gap(once, again) == 0
    torchs = _in_precision("tf32", lane="serial")
    assert _apart(once, exact) < 1.5 * _apart(torchs, exact)


def test_first_a_joined_rectifier_and_pool_change_no_bit(monkeypatch) -> None:
    joined = _in_precision("tf32")
    monkeypatch.setattr(captured, "join_rectifiers", lambda traced: None)
    assert _gap(joined, _in_precision("tf32")) == 0


@pytest.mark.parametrize(
    "case",
    [
        (3, 32, 32, 3, 1, 0, 1),
        (32, 64, 30, 3, 1, 0, 1),
        (1, 32, 28, 5, 1, 2, 1),
        (32, 64, 14, 5, 1, 2, 1),
        (16, 24, 17, 3, 2, 1, 1),
        (8, 8, 15, 3, 1, 2, 2),
        (128, 256, 8, 3, 1, 1, 1),
    ],
    ids=str,
)
def test_first_convolution_kernels_are_near_the_exact_ones(case: tuple[int, ...]) -> None:
    """Two factors cut to tf32's ten bits are at most 2^-9 from the product; sums of such errors are smaller."""
    channels, outputs, size, kernel, stride, padding, dilation = case
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = ((4, 6, channels, size, size), (4, outputs, channels, kernel, kernel), (4, outputs))
    given = [torch.randn(shape, device="cuda", generator=draw) for shape in shapes]
    x, weight, bias = (value.double().requires_grad_() for value in given)
    geometry = ((stride, stride), (padding, padding), (dilation, dilation))
    wanted = torch.stack([F.conv2d(*one, stride, padding, dilation) for one in zip(x, weight, bias)])
    above = torch.randn(wanted.shape, device="cuda", generator=draw)
    call = client_convolutions._Call(*geometry)
    with torch.no_grad():
        got = (call.forward(4, *given), *call.backward(above))
    for one, exact in zip(got, (wanted, *torch.autograd.grad(wanted, (x, weight, bias), above.double())), strict=True):
        assert float((one.double() - exact).norm() / exact.norm()) < 1e-3


def test_attention_by_kernels_is_as_near_the_exact_one_as_that_of_torch() -> None:
    rows = torch.randn(3, 5, 50, 3 * 2 * 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def gradients(attend: Any, rows: torch.Tensor) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            parts = x.unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind(0)
            return attend(*parts).double().square().sum()

        return torch.func.vmap(torch.func.grad(loss))(rows)

    exact = gradients(attention.folded, rows.double())
    half = rows.bfloat16()
    assert attention._is_short(*[half[0].unflatten(-1, (6, 32)).transpose(1, 2)] * 3)
    ours = gradients(attention.folded, half)
    assert torch.equal(ours, gradients(attention.folded, half))
    torchs = torch.stack([gradients(F.scaled_dot_product_attention, part.unsqueeze(0))[0] for part in half])
    apart, torchs_apart = (float((one.double() - exact).norm() / exact.norm()) for one in (ours, torchs))
    assert apart < 1.5 * torchs_apart + 1e-3


@pytest.mark.parametrize("count", [1, 2, 7, 21, 40, 64, 65, 128])
def test_robust_merges_by_kernels_are_sorts(count: int) -> None:
    """Of values whose sums are exact in float64: some as they come, some of which many are equal or as near."""
    drawn = torch.randn(count, 100, 333, generator=torch.Generator().manual_seed(0))
    for stacked in ((drawn * 2**16).round() / 2**16, drawn.round(), (drawn * 4).round().transpose(1, 2)):
        there, everyone = stacked.cuda(), torch.arange(count)
        assert coordinate_wise.sorts_in_registers(there, count)
        for cut in {0, count // 5, (count - 1) // 2}:
            wanted = coordinate_wise.trimmed_mean(stacked, cut)
            assert torch.equal(coordinate_wise.trimmed_mean(there, cut).cpu(), wanted)
        for chosen in (everyone, everyone.flip(0)[: count // 2 + 1]):
            for keep in {1, len(chosen) // 2, len(chosen)} - {0}:
                wanted = krum.around_median(stacked, chosen, keep)
                assert torch.equal(krum.around_median(there, chosen, keep).cpu(), wanted)


def test_robust_merges_of_many_values_and_of_more_rows_than_a_thread_sorts() -> None:
    for shape in ((50, 2**20 + 5), (129, 1000)):
        stacked = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2**16).round() / 2**16
        models = {"params": {"a": stacked}, "buffers": {"mean": stacked[:, :10], "n": torch.arange(shape[0])}}
        weights = torch.full((shape[0],), 1 / shape[0], dtype=torch.float64)
        for rule in (coordinate_wise.Median(), coordinate_wise.TrimmedMean(f=5), krum.Bulyan(f=5)):
            got = tree.to(rule.merge(tree.to(models, "cuda"), weights.cuda()), "cpu")
            wanted = rule.merge(models, weights)
            assert all(torch.equal(one, other) for one, other in zip(tree.leaves(got), tree.leaves(wanted)))
