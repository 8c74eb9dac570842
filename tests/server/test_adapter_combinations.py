"""Every rule for adapters with other methods' parts: what runs, and what is refused for which reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import CLIENTS

import consilience as cs
from consilience.client.memory.corrections import ControlVariate
from consilience.client.memory.models import PreviousModel
from consilience.client.personal_layers import Named
from consilience.client.terms.linear import Linear
from consilience.client.terms.proximal import Proximal
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.flower.secure.eligibility import secure_terms
from consilience.server.averaging.combining.redecomposed import Redecomposed
from consilience.server.averaging.ledgers.drift import ControlVariates
from consilience.server.averaging.steps.adaptive import AdamStep
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.averaging.weighting.schedule import ScheduleWeights
from consilience.server.averaging.weighting.simprox import SimProxWeights
from consilience.server.geometry.adapters import Adapters
from consilience.server.geometry.gaussian_cosine import GaussianCosine
from consilience.server.geometry.similarity import cka_linear

pytestmark = pytest.mark.usefixtures("untraced")
RECIPES: dict[str, dict[str, Any]] = {
    "fedit": {},
    "ffa_lora": {},
    "flora": {},
    "flora with ranks": {"ranks": (1, 2, 2)},
    "flexlora": {},
    "flexlora with ranks": {"ranks": (1, 2, 2)},
    "hetlora": {"ranks": (1, 2, 2)},
}
SCAFFOLD: dict[str, Any] = {
    "terms": (Linear(received="control_variate", remembered="control_variate"),),
    "memory": (ControlVariate(),),
    "ledgers": (ControlVariates(),),
    "weighting": UniformWeights(),
}
PARTS: dict[str, dict[str, Any]] = {
    "SimProx": {"weighting": SimProxWeights()},
    "SimProx on products": {"weighting": SimProxWeights(similarity=Adapters())},
    "SimProx on factors": {"weighting": SimProxWeights(similarity=Adapters(compare_on="factors"))},
    "SimProx from own models": {
        "weighting": SimProxWeights(previous_model="own"),
        "memory": (PreviousModel(report=True),),
    },
    "DUW": {"weighting": ScheduleWeights(table=((0.1, 0.3, 0.05, 0.35, 0.2),) * 2)},
    "FedProx": {"terms": (Proximal(mu=0.1),)},
    "SCAFFOLD": SCAFFOLD,
    "median": {"combine": "median"},
    "Krum": {"combine": "krum"},
    "centred clipping": {"combine": "centred_clipping"},
    "FedAdam": {"step": AdamStep()},
    "personal head": {"personal_layers": Named(patterns=("5.*",))},
    "top-k": {"channel": {"name": "top_k", "fraction": 0.3}},
    "quantised": {"channel": "quantise"},
    "over the air": {"channel": "over_the_air"},
}
NEW = "FLoRA's adapters begin anew in every round"
BASIS = "FlexLoRA's factors are of another basis in every round"
EACH = "delivers only the sum of the replies, but"
REFUSED: dict[tuple[str, str], str] = {  # (recipe, part) -> the reason
    ("ffa_lora", "SimProx on products"): "the model has no adapters",  # A is a constant: B says all
    ("flora", "SimProx on products"): "the model has no adapters",  # products are what it is given
    ("flora", "SimProx on factors"): "no parameter is named lora_A or lora_B",
    ("flora", "SimProx from own models"): NEW,
    ("flora", "SCAFFOLD"): NEW,
    ("flora", "top-k"): NEW,
    ("flora", "over the air"): EACH,
    ("flexlora", "SimProx from own models"): BASIS,
    ("flexlora", "SCAFFOLD"): BASIS,
    ("flexlora", "FedAdam"): BASIS,
    ("flexlora", "top-k"): BASIS,
    ("flexlora", "over the air"): EACH,
    ("hetlora", "median"): "counts every reply the same",
    ("hetlora", "Krum"): "counts every reply the same",
    ("hetlora", "over the air"): EACH,
}


def refused(name: str, part: str) -> str | None:
    return REFUSED.get((name.partition(" ")[0], part))


def outcome(algorithm: Any) -> Any:
    module = tiny.module_for(algorithm, tiny.lora_mlp)
    *_, last = run(algorithm, tiny.engine(lambda: module), rounds=2, seed=1)
    return last


def built(name: str, **parts: Any) -> Any:
    return getattr(cs, name.partition(" ")[0])(lr=0.1, batch_size=4, **RECIPES[name], **parts)


@pytest.fixture(scope="module")
def plain() -> Any:
    return {name: outcome(built(name)).model for name in RECIPES}


def test_the_table_of_refusals_is_small() -> None:
    assert {(n, p) for n, p in REFUSED} <= {(name.partition(" ")[0], part) for name in RECIPES for part in PARTS}
    assert len(REFUSED) == 15 and len(RECIPES) * len(PARTS) == 105


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_part_changes_what_is_learned_or_is_refused(name: str, part: str, plain: Any) -> None:
    reason = refused(name, part)
    if reason is not None:
        with pytest.raises(Invalid) as refusal:
            outcome(built(name, **PARTS[part]))
        assert reason in str(refusal.value)
        return
    last = outcome(built(name, **PARTS[part]))
    assert tiny.finite(last.model) and tiny.finite(last.snapshot.server)
    assert tiny.gap(last.model, plain[name]) > 1e-6


@pytest.mark.parametrize("name", RECIPES)
def test_secure_sums_where_a_mean_is_all_that_is_needed(name: str) -> None:
    settings = {"clip": 1.0, "levels": 2**16, "threshold": 0.5}
    if name in ("fedit", "ffa_lora"):
        assert secure_terms(built(name), **settings).weights == "examples"
        return
    with pytest.raises(Invalid, match=r"delivers only the sum of the replies, but \w+ .*reads each reply"):
        secure_terms(built(name), **settings)


# --- swapping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "similarity",
    [
        Adapters(),
        Adapters(compare_on="factors"),
        Adapters(similarity=GaussianCosine(compare_on="updates")),  # products start at 0, which has no direction
        {"name": "adapters", "compare_on": "products", "similarity": {"name": "layerwise", "metric": "cca"}},
    ],
)
def test_simfedswap_pairs_clients_by_their_adapters(similarity: Any) -> None:
    algorithm = cs.simfedswap(lr=0.1, batch_size=4, similarity=similarity)
    done = list(run(algorithm, tiny.engine(tiny.lora_mlp), rounds=3, seed=1))
    assert done[0].notes["similarity"].shape == (CLIENTS, CLIENTS)
    assert sorted(done[0].notes["model_of"].tolist()) == list(range(CLIENTS))
    assert done[0].notes["model_of"].tolist() != list(range(CLIENTS))


def test_simfedswap_may_average_as_flexlora_does() -> None:
    algorithm = cs.simfedswap(lr=0.1, batch_size=4, h2=2, similarity=Adapters(), combine=Redecomposed())
    done = list(run(algorithm, tiny.engine(tiny.lora_mlp), rounds=2, seed=1))
    replies, after = done[1].cohort.reply["model"]["params"], done[1].model["params"]
    shares = np.array(tiny.SIZES) / sum(tiny.SIZES)
    mean = np.einsum("k,koi->oi", shares, (replies["1.lora_B.weight"] @ replies["1.lora_A.weight"]).numpy())
    u, s, vh = np.linalg.svd(mean)
    got = (after["1.lora_B.weight"] @ after["1.lora_A.weight"]).numpy()
    np.testing.assert_allclose(got, u[:, :2] * s[:2] @ vh[:2], rtol=0, atol=1e-12)


def test_products_are_compared_as_products() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 5, generator=draw), torch.randn(3, 7, 2, generator=draw)
    turn = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    a[1], b[1] = turn @ a[0], b[0] @ turn.inverse()  # other factors of one product
    models = {"x.lora_A": a.double(), "x.lora_B": b.double(), "head": torch.randn(3, 4, 4, generator=draw)}
    ancestor = {name: value[0] for name, value in models.items()}
    found = Adapters().compare(models, ancestor)
    assert found[0, 1] == pytest.approx(1, abs=1e-6) and found[0, 2] < 0.9
    products = (b @ a).double()
    assert found[0, 2] == pytest.approx(float(cka_linear(products[0], products[2])), abs=1e-6)
    assert Adapters(compare_on="factors").compare(models, ancestor)[0, 1] < 0.99


def test_simprox_of_models_that_start_at_zero_compares_updates() -> None:
    class Adapted(torch.nn.Module):  # nothing but an adapter is trained
        def __init__(self) -> None:
            super().__init__()
            self.layer = tiny.lora_mlp()[1]
            self.head = torch.nn.Linear(8, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x.flatten(1)))

    def learned(**options: Any) -> Any:
        algorithm = cs.ffa_lora(lr=0.1, weighting=SimProxWeights(**options))
        module = tiny.module_for(algorithm, lambda: tiny.seeded(Adapted))
        return list(run(algorithm, tiny.engine(lambda: module), rounds=2, seed=1))

    with pytest.raises(Invalid, match=r"the global model is all zeros, .* compare updates with compare_on = 'updates'"):
        learned()
    assert all(tiny.finite(done.model) for done in learned(compare_on="updates"))
