"""The strategies, one line each: a recipe, and what its server needs from clients besides a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from consilience import algorithms
from consilience.algorithms._common import Common
from consilience.core.algorithm import Algorithm
from consilience.core.capabilities import ReceivesSizes, capability
from consilience.core.settings import Invalid, Option, options_of, refuse_unknown
from consilience.options.recipes import built
from consilience.server.protocols import read_by

SERVER_PARTS = ("weighting", "combine", "step")  # of the options that recipes share, those of the server
TREES = ("control_change",)  # reply entries with the parameters' shapes; all others are numbers


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A strategy: its recipe, what it needs of the client's code, and which options of local training its server reads.

    `numbers`: what replies must hold, as metrics (`start_loss` is the metric `start-loss`).
    """

    recipe: str
    client: str = ""  # in words, for the documentation
    numbers: tuple[str, ...] = ()
    steps: bool = False  # replies must contain `num-steps`
    identity: bool = False  # the server uses the client's number, so replies must contain it
    local: tuple[str, ...] = ()

    @property
    def build(self) -> Callable[..., Algorithm]:
        """The recipe."""
        return algorithms.recipe(self.recipe)

    @property
    def options(self) -> dict[str, Option]:
        """Its own settings, in the recipe's order, and the parts of the server that may be replaced."""
        known = options_of(self.build)
        shared = (*SERVER_PARTS, *self.local)
        return {name: option for name, option in known.items() if name not in Common.__annotations__ or name in shared}

    def algorithm(self, given: dict[str, Any], name: str) -> Algorithm:
        """The algorithm with these options, checked as the recipe's own are."""
        refuse_unknown(given, self.options, name)
        return built(self.build, given, key=name)[0]

    def sent(self, given: dict[str, Any]) -> dict[str, Any]:
        """The options that are numbers or words, with their defaults: they are sent to clients."""
        values = {name: given.get(name, option.default) for name, option in self.options.items()}
        return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


OWN = "any"
PROX = "FedProxTerm"

STRATEGIES: dict[str, Entry] = {
    "FedAvg": Entry(recipe="fedavg", client=OWN),
    "SimProx": Entry(recipe="simprox", client=OWN),
    "SimAgg": Entry(recipe="simagg", client=OWN),
    "FedAtt": Entry(recipe="fedatt", client=OWN),
    "FedAvgM": Entry(recipe="fedavgm", client=OWN),
    "FedAdagrad": Entry(recipe="fedadagrad", client=OWN),
    "FedAdam": Entry(recipe="fedadam", client=OWN),
    "FedYogi": Entry(recipe="fedyogi", client=OWN),
    "FedAdp": Entry(recipe="fedadp", client=OWN),
    "Median": Entry(recipe="coordinate_median", client=OWN),
    "TrimmedMean": Entry(recipe="trimmed_mean", client=OWN),
    "GeometricMedian": Entry(recipe="geometric_median", client=OWN),
    "Krum": Entry(recipe="krum", client=OWN),
    "MultiKrum": Entry(recipe="multi_krum", client=OWN),
    "Bulyan": Entry(recipe="bulyan", client=OWN),
    "CentredClipping": Entry(recipe="centred_clipping", client=OWN),
    "FedSwap": Entry(recipe="fedswap", client=OWN),
    "SimFedSwap": Entry(recipe="simfedswap", client=OWN),
    "DUWFedAvg": Entry(recipe="duw_fedavg", client="reports `partition-id`", identity=True),
    "FedNova": Entry(recipe="fednova", client="reports `num-steps`", steps=True, local=("momentum",)),
    "DRFedAvg": Entry(recipe="dr_fedavg", client="reports `start-loss`", numbers=("start_loss",)),
    "QFFL": Entry(recipe="qffl", client="reports `start-loss`", numbers=("start_loss",), local=("lr",)),
    "FedFa": Entry(recipe="fedfa", client="reports `correct`, `rows`", numbers=("correct", "rows")),
    "FedProx": Entry(recipe="fedprox", client=PROX),
    "FedAMP": Entry(recipe="fedamp", client=f"{PROX} with `lam / alpha`"),
    "FedBN": Entry(recipe="fedbn", client="load_shared"),
    "Moon": Entry(recipe="moon", client="MoonTerm"),
    "Scaffold": Entry(recipe="scaffold", client="ScaffoldState"),
    "FedDyn": Entry(recipe="feddyn", client="FedDynTerm"),
    "FedDC": Entry(recipe="feddc", client="FedDCTerm"),
    "FedSiamDA": Entry(recipe="fedsiam_da", client="FedSiamTerm"),
    "FedSplit": Entry(recipe="fedsplit", client="FedSplitTerm", local=("lr", "momentum")),
    "FedProxFedSplit": Entry(recipe="fedprox_fedsplit", client="FedSplitTerm", local=("lr", "momentum")),
}


def needs_of(entry: Entry, algorithm: Algorithm) -> tuple[str, ...]:
    """What replies must contain beside the model, by the entry and by the server's parts."""
    return tuple(dict.fromkeys((*entry.numbers, *read_by(algorithm.server))))


def refuse_unworkable(name: str, algorithm: Algorithm) -> None:
    """Refuse settings that need information that a Flower server does not have."""
    sized = capability(algorithm.server, ReceivesSizes)
    if sized is not None and sized.needs_sizes:
        raise Invalid(
            f"{name}.weights = 'examples' needs every client's size before the first round, which a Flower server does "
            "not know: use weights = 'uniform', or consilience's own engine"
        )
