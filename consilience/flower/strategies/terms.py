"""Objectives for your own training loop: the library's terms and memories for an ordinary PyTorch module.

Create one before the first step, while the model still holds the received values. Nothing here needs Flower.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.client.cosine import cosine
from consilience.client.memory.corrections import ControlVariate, Drift, Gradient
from consilience.client.memory.memory import Memory, TrainingEnd
from consilience.client.prox_centering import Centring, ReflectedProximal
from consilience.client.siamese_training import SiameseTraining
from consilience.client.solvers import SGD
from consilience.client.terms.contrastive import Contrastive
from consilience.client.terms.linear import DriftCorrected, Linear
from consilience.client.terms.proximal import Proximal
from consilience.client.terms.term import Context, Term
from consilience.core.plans import Batch
from consilience.core.settings import Invalid

Values = dict[str, Tensor]
"""Tensors by the names of the model's parameters."""
Features = Callable[[nn.Module, Any], Tensor]


class FedProxTerm:
    """mu/2 |w - w_received|^2: `loss = criterion(model(x), y) + term(model)`."""

    def __init__(self, model: nn.Module, mu: float) -> None:
        self._term, self._received = Proximal(mu=mu), _copies(trained(model))

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty; its gradient is mu (w - w_received)."""
        return _sum((self._term,), model, _message(self._received), {})


class FedDynTerm:
    """-<g, w> + alpha/2 |w - w_received|^2, g the gradient that the client remembers (zero at first)."""

    def __init__(self, model: nn.Module, alpha: float, gradient: Mapping[str, Tensor] | None = None) -> None:
        self._memory = Gradient(alpha=alpha)
        self._terms = (Linear(remembered=self._memory.name), Proximal(mu=alpha))
        self._received = _copies(trained(model))
        self._gradient = _like(self._received, gradient, "gradient")

    def __call__(self, model: nn.Module) -> Tensor:
        """The two terms together."""
        return _sum(self._terms, model, _message(self._received), {self._memory.name: self._gradient})

    def remembered(self, model: nn.Module) -> Values:
        """g - alpha (w - w_received): what to remember after the last step."""
        return _update(self._memory, self._gradient, model, _message(self._received))[0]


class FedSplitTerm:
    """1/(2 step) |w - (2x - z)|^2, x the received parameters and z the client's splitting variable (x at first)."""

    def __init__(
        self, model: nn.Module, step: float, z: Mapping[str, Tensor] | None = None, relaxation: float = 1.0
    ) -> None:
        self._term, self._memory = ReflectedProximal(step=step), Centring(relaxation=relaxation)
        self._received = _copies(trained(model))
        self._z = dict(self._received) if z is None else _like(self._received, z, "z")

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty; its gradient is (w - 2x + z) / step."""
        return _sum((self._term,), model, _message(self._received), {self._memory.name: self._z})

    def remembered(self, model: nn.Module) -> Values:
        """z + 2 relaxation (w - x): what to remember after the last step."""
        return _update(self._memory, self._z, model, _message(self._received))[0]


class ScaffoldState:
    """SCAFFOLD's control variates in one round: the server's c and the client's own c_i (zero at first)."""

    def __init__(self, model: nn.Module, server: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None) -> None:
        self.received = _copies(_named(model, server))
        self.server = _like(self.received, server, "the server's control variate")
        self.own = _like(self.received, own, "the client's control variate")
        self.steps = 0


def correct_gradients(model: nn.Module, state: ScaffoldState) -> None:
    """Add c - c_i to the gradients: call it between `loss.backward()` and the step of plain SGD."""
    for name, parameter in trained(model).items():
        change = (state.server[name] - state.own[name]).to(parameter)
        parameter.grad = change if parameter.grad is None else parameter.grad + change
    state.steps += 1


def scaffold_reply(model: nn.Module, state: ScaffoldState, *, lr: float) -> tuple[Values, Values]:
    """(change of c_i, to send as the ArrayRecord `control_change`; new c_i, to remember), after K steps at rate lr.

    c_i - c + (x - y) / (K lr), option II.
    """
    message = {**_message(state.received), "control_variate": state.server}
    own, said = _update(ControlVariate(), state.own, model, message, steps=state.steps, lr=lr)
    return OrderedDict(said["control_change"]), own


class FedDCTerm:
    """alpha/2 |h_i + w - w_received|^2 + <g - g_i, w>: drift h_i and gradient g_i are the client's, g the server's."""

    def __init__(
        self,
        model: nn.Module,
        alpha: float,
        server: Mapping[str, Tensor],
        memory: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        kept = memory or {}
        gradient = Linear(received="control_variate", remembered="control_variate")
        self._terms = (DriftCorrected(alpha=alpha), gradient)
        self._received = _copies(_named(model, server))
        self._server = _like(self._received, server, "the server's gradient")
        self._memory = {name: _like(self._received, kept.get(name), name) for name in ("drift", "control_variate")}

    def __call__(self, model: nn.Module) -> Tensor:
        """The two terms together."""
        message = {**_message(self._received), "control_variate": self._server}
        return _sum(self._terms, model, message, self._memory)

    def reply(self, model: nn.Module, *, lr: float, steps: int) -> tuple[Values, dict[str, Values]]:
        """(what to send as `control_change`, what to remember: drift and control_variate), after plain SGD."""
        message = {**_message(self._received), "control_variate": self._server}
        drift, _ = _update(Drift(), self._memory["drift"], model, message)
        own, said = _update(ControlVariate(), self._memory["control_variate"], model, message, steps=steps, lr=lr)
        return OrderedDict(said["control_change"]), {"drift": drift, "control_variate": own}


class MoonTerm:
    """-mu log(e^{a/T} / (e^{a/T} + e^{b/T})): a, b = cosines of z with the received and the client's last model's.

    `previous` is the state dict at the end of the client's last round; without one the term is zero.
    """

    def __init__(
        self,
        model: nn.Module,
        previous: Mapping[str, Tensor] | None = None,
        mu: float = 1.0,
        temperature: float = 0.5,
        features: Features | None = None,
    ) -> None:
        self._settings = Contrastive(mu=mu, temperature=temperature)  # checked there
        self._features = features or features_of
        self._received = frozen(model)
        self._previous = None if previous is None else frozen(model, previous)

    def __call__(self, z: Tensor, x: Any) -> Tensor:
        """The model-contrastive loss of the representations z = features(x) of a batch."""
        if self._previous is None:
            return z.sum() * 0
        with torch.no_grad():
            received, own = self._features(self._received, x), self._features(self._previous, x)
        closer = (cosine(z, received) - cosine(z, own)) / self._settings.temperature  # [B]
        return self._settings.mu * -F.logsigmoid(closer).mean()


def trained(model: nn.Module) -> Values:
    """The trainable parameters, tied ones once."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def frozen(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A frozen copy in evaluation mode, with these values if given."""
    still = copy.deepcopy(model)
    if values is not None:
        still.load_state_dict(dict(values))
    return still.eval().requires_grad_(False)


def features_of(model: Any, x: Any) -> Tensor:
    """The model's own representation."""
    if not callable(getattr(model, "features", None)):
        raise Invalid(
            f"{type(model).__name__} has no features(x) method: add one that returns [B, d], or pass features"
        )
    return model.features(x)


def _named(model: nn.Module, like: Mapping[str, Tensor]) -> Values:
    """The model's values under the names that the server has, tied and frozen ones included."""
    values = model.state_dict()
    missing = [name for name in like if name not in values]
    if missing:
        raise Invalid(f"the server knows {missing[0]!r}, which is not in this model: both sides need one model")
    return {name: values[name] for name in like}


def _copies(values: Mapping[str, Tensor]) -> Values:
    return {name: value.detach().clone() for name, value in values.items()}


def _like(received: Values, given: Mapping[str, Tensor] | None, what: str) -> Values:
    """What is remembered or was sent, by the parameters' names; zero if nothing is."""
    if given is None:
        return {name: torch.zeros_like(value) for name, value in received.items()}
    for name, value in received.items():
        if name not in given or given[name].shape != value.shape:
            found = "missing" if name not in given else f"of shape {tuple(given[name].shape)}"
            raise Invalid(f"{what} is {found} for {name!r}, which has shape {tuple(value.shape)}")
    return {name: given[name].detach().to(value) for name, value in received.items()}


def _message(received: Values) -> dict[str, Any]:
    return {"model": {"params": received}, "round": torch.zeros((), dtype=torch.int64)}


def _sum(terms: tuple[Term, ...], model: nn.Module, message: dict[str, Any], memory: dict[str, Any]) -> Tensor:
    # these terms depend on the parameters only, not on the task or the batch
    context = Context(None, message, memory, {}, None)  # type: ignore[arg-type]
    nothing: Batch = None  # type: ignore[assignment]
    values = [term(trained(model), context, nothing) for term in terms]
    return sum(values[1:], values[0])


def _update(
    memory: Memory, old: Values, model: nn.Module, message: dict[str, Any], *, steps: int = 1, lr: float = 1.0
) -> tuple[Values, Any]:
    """(what to remember, what to send) after the last step."""
    names = message["model"]["params"]
    with torch.no_grad():
        ended = {"params": _copies(_named(model, names))}
        done = TrainingEnd(ended, message, {}, torch.tensor(float(steps), dtype=torch.float64), SGD(lr=lr))
        return memory.update(old, done)


class FedSiamTerm:
    """mu (cos(z_past, z) - 1/2 cos(p', sg z) - 1/2 cos(p, sg z')): ' is a private copy of the received model.

    The copy learns too: give `parameters()` to the optimiser together with the model's. `previous` is the client's last
    state dict; call `new_epoch` before every local epoch but the first. The model needs features(x) and predict(z).
    """

    def __init__(
        self,
        model: nn.Module,
        previous: Mapping[str, Tensor] | None = None,
        mu: float = 0.1,
        freeze_global: bool = False,
    ) -> None:
        settings = SiameseTraining(mu=mu, freeze_global=freeze_global)  # checked there
        if not callable(getattr(model, "predict", None)):
            raise Invalid(f"{type(model).__name__} has no predict(z) method, which siamese training needs")
        self._mu, self._frozen = settings.mu, settings.freeze_global
        self._copy: Any = frozen(model) if freeze_global else copy.deepcopy(model).train()
        self._past = None if previous is None else frozen(model, previous)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trainable parameters of the copy."""
        return (value for value in self._copy.parameters() if value.requires_grad)

    def new_epoch(self, model: nn.Module) -> None:
        """The model as it is now becomes the past one."""
        self._past = frozen(model)

    def __call__(self, z: Tensor, p: Tensor, x: Any) -> Tensor:
        """The term for z = features(x) and p = predict(z) of a batch; its gradient reaches model and copy."""
        away = z.sum() * 0
        if self._past is not None:
            with torch.no_grad():
                past = features_of(self._past, x)
            away = cosine(past, z).mean()
        if self._frozen:
            with torch.no_grad():
                other = features_of(self._copy, x)
            return self._mu * (away - cosine(p, other).mean() / 2)
        other = features_of(self._copy, x)
        predicted = self._copy.predict(other)
        closer = cosine(p, other.detach()).mean() + cosine(predicted, z.detach()).mean()
        return self._mu * (away - closer / 2)
