"""A task: a module and its kind of task, as pure functions of a tree of tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilience.core import notebook, rng, tree
from consilience.core import task as contract
from consilience.core.kind import Kind, loss_name
from consilience.core.metrics import Loss, Metric, Metrics, loss_metric
from consilience.core.plans import Batch
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.layers.exact import ExactBatchNorm, extra_inputs, key_inputs, make_exact, use_matmul
from consilience.layers.randomness import Guard, KeyedDraws
from consilience.task.kinds import kind_named, kind_with_loss
from consilience.task.losses import WeightedLoss
from consilience.task.measures import hits

EVALUATION = rng.key(0, "evaluation")  # what a module draws from in evaluation


class Task(contract.Task):
    """A model and its kind of task; the model's values live in trees `{"params": ..., "buffers": ...}`.

        task = cs.Task(nn.Linear(4, 3))
        output, buffers = task.apply(task.start(), x, train=False)

    module: any `nn.Module` that works under `torch.func`; it is copied, never changed. Parameters with
    `requires_grad=False` (a frozen encoder) are constants: they are never trained or sent, and all threads and
    clients of a device use one copy.
    kind: "classification", "binary" (one logit a row), "multi_label" (one for each of several labels), "regression",
    "tokens", "next_token", "dense" (pixels), or a `Kind` of your own; left out, what the loss belongs to, or
    classification.
    loss: the name of a loss of the kind, or a function (output, target) -> [B] loss per example; by default the kind's.
    metrics: further ones, next to the kind's; one that has the key of a metric of the kind replaces it, unless that
    is the main one.
    settings: of a built-in kind: class_weights, label_smoothing, ignore_index.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: str | Kind | None = None,
        *,
        loss: str | Loss | None = None,
        metrics: Sequence[Metric] = (),
        **settings: Any,
    ) -> None:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise Invalid(f"parameter {name!r} is not initialised: run the module once on a batch first")
        if kind is None:
            kind = kind_with_loss(loss).name if isinstance(loss, str) else "classification"
        if isinstance(kind, Kind) and settings:
            raise Invalid(f"{', '.join(settings)} cannot be set beside a Kind: make the kind with it, or name a kind")
        self.module = module
        self.kind = kind_named(kind, **settings) if isinstance(kind, str) else kind
        self.losses: Loss = loss if callable(loss) else self.kind.loss(loss)
        self.loss_name = loss_name(self.losses)
        self.added = tuple(metrics)
        self.metrics = self._all_metrics()
        exact = make_exact(_sharing_copy(module))
        frozen = _frozen_modules(module)
        self._exact = self._placed = exact
        self._parameters = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        self._buffers = tuple(n for n, _ in module.named_buffers() if not n.startswith(frozen))
        if not self._parameters:
            raise Invalid("the model has no trainable parameters: nothing can be learned")
        self._masks = extra_inputs(exact, ExactBatchNorm, "mask")
        self._keys = key_inputs(exact)
        self._replicas = threading.local()  # functional_call swaps values into the module: one per thread
        self._guarded: set[tuple[bool, torch.device]] = set()  # in which modes and where it was seen to draw from keys
        self._place: tuple[torch.device, torch.dtype | None] = (torch.device("cpu"), None)
        self._given: Tree = {}
        self.ready()

    def __repr__(self) -> str:
        return f"Task({type(self.module).__name__} with {self.parameters:,} parameters, loss={self.loss_name!r})"

    def _repr_html_(self) -> str:
        rows = [
            ("model", type(self.module).__name__),
            ("parameters", f"{self.parameters:,} trained, {sum(p.numel() for p in self.frozen.values()):,} constant"),
            ("kind", self.kind.name),
            ("loss", self.loss_name),
            ("metrics", ", ".join(row.title for row in self.metrics.rows)),
        ]
        return notebook.table("Task", rows)

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def start(self) -> Tree:
        """The module's current values: the model of round 0."""
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        values = {
            "params": {name: parameters[name] for name in self._parameters},
            "buffers": {name: buffers[name] for name in self._buffers},
        }
        return tree.clone(values)

    def to(self, device: torch.device, dtype: torch.dtype | None = None, *, matmul: bool = False) -> Task:
        """The same task with its constants on a device and in a dtype, and convolutions as matrix products if asked."""
        moved = copy.copy(self)
        if (device, dtype) != self._place:
            moved._placed = _sharing_copy(self._exact, device, dtype)
        if matmul:
            moved._placed = use_matmul(_sharing_copy(moved._placed))
        moved._replicas, moved._place = threading.local(), (device, dtype)
        if isinstance(self.losses, WeightedLoss):
            moved.losses = self.losses.placed(device, dtype)
            moved.metrics = moved._all_metrics()
        return moved.ready()

    def ready(self) -> Task:
        """Make this thread's working copies of the module, which cannot be made inside a traced function."""
        for name in ("train", "eval"):
            if not hasattr(self._replicas, name):
                module = _sharing_copy(self._placed).train(name == "train")
                for prefix in _frozen_modules(self.module):  # frozen parts keep their statistics
                    module.get_submodule(prefix[:-1]).eval()
                setattr(self._replicas, name, module)
        return self

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The constants: parameters that are not trained, by name. A part may add its own by a method `constants()`."""
        found = {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}
        for name, part in self.module.named_modules():
            if hasattr(part, "constants"):
                found.update({f"{name}.{key}": value for key, value in part.constants().items()})
        return found

    @functools.cached_property
    def frozen_digest(self) -> str:
        """SHA-256 of the constants, "" if there are none: what a checkpoint and a message hold in their place."""
        digest, frozen = hashlib.sha256(), self.frozen
        for name, value in sorted(frozen.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        return digest.hexdigest() if frozen else ""

    def apply(
        self,
        model: Tree,
        x: Any,
        *,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        through: Callable[[nn.Module, Any], Any] | None = None,
    ) -> tuple[Any, Tree]:
        """(output, buffers after the pass); `mask` and `key` serve batch norm and dropout in training.

        `through(module, x)` may use the module's other methods: what it returns is the output instead of forward's.
        """
        buffers = {name: value.clone() for name, value in model["buffers"].items()} if train else model["buffers"]
        values = {**self._given, **model["params"], **buffers}
        if train and mask is not None:
            values.update(dict.fromkeys(self._masks, mask))
        if train and key is not None:
            values.update(dict.fromkeys(self._keys, key))
        module = self._replica(train)
        for name in self._keys:
            module.get_submodule(name.rpartition(".")[0]).calls = 0  # type: ignore[assignment]
        with self._draws(train, mask, key):
            if through is None:
                return functional_call(module, values, (x,)), buffers
            with _forwarding_to(through, module):
                return functional_call(module, values, (x,)), buffers

    def features(
        self, model: Tree, x: Any, *, train: bool = False, mask: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """[B, d] the representation in front of the last layer: the module's own `features(x)`, of all entries."""
        if not hasattr(self.module, "features"):
            raise Invalid(f"{type(self.module).__name__} has no features(x) method: add one that returns [B, d]")
        found = self.apply(model, x, train=train, mask=mask, key=key, through=_features)[0]
        return found.flatten(1) if found.dim() > 2 else found

    def training_batch(self, batch: Batch) -> Batch:
        """The batch as used in training: unchanged, unless the module has a method of this name."""
        vary = getattr(self.module, "training_batch", None)
        return batch if vary is None else vary(batch)

    def row_losses(self, output: Any, batch: Batch) -> Tensor:
        """[B] the losses of a batch, times the weights of its rows where they have any."""
        losses = self.losses(output, batch.y)
        return losses if batch.weight is None else losses * batch.weight.to(losses.dtype)

    def decide(self, output: Tensor) -> Tensor:
        """Class numbers from the model's output."""
        if self.kind.decide is None:
            raise Invalid(f"{self.kind.name} decides nothing: there are no classes")
        return self.kind.decide(output)

    def hits(self, output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """[B] the share of right decisions among the entries of each row that count; 0 where nothing is decided."""
        if self.kind.decide is None:
            return torch.zeros_like(mask)
        if self.kind.entries is None:
            return hits(self.kind.decide, output, target, mask)
        counted = self.metrics.counted(target, torch.ones_like(mask))
        right = hits(self.kind.decide, output, target, counted) * counted
        return right.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)

    def knowing(self, width: int | None) -> Task:
        """The same task, whose metrics know how many classes, labels or outputs a row has; None: not known."""
        known = copy.copy(self)
        known.kind = self.kind.knowing(width)
        known.metrics = known._all_metrics()
        known._replicas = threading.local()
        return known.ready()

    def with_module(self, module: nn.Module) -> Task:
        """The same task with another module."""
        return Task(module, self.kind, loss=self.losses, metrics=self.added)

    def given(self, values: Tree) -> Task:
        """The same task, in which some of the module's values, by their names, are these and not part of the model."""
        known = copy.copy(self)
        known._given = {**self._given, **values}
        return known

    def _all_metrics(self) -> Metrics:
        kind = self.kind
        replaced = {metric.key for metric in self.added} - {kind.main}
        own = (metric for metric in kind.metrics if metric.key not in replaced)
        metrics = (loss_metric(self.losses), *own, *self.added)
        return Metrics(metrics=metrics, main=kind.main, entries=kind.entries, example=kind.example)

    def trained(self, model: Tree) -> nn.Module:
        """A copy of the user's module holding these values, ready to use or save."""
        module = copy.deepcopy(self.module)
        values = {**model["params"], **model["buffers"]}
        with torch.no_grad():
            for name, target in (*module.named_parameters(), *module.named_buffers()):
                if name in values:
                    target.copy_(values[name])
        return module.eval()

    @contextlib.contextmanager
    def _draws(self, train: bool, mask: Tensor | None, key: Tensor | None) -> Iterator[None]:
        """Random operations draw from the key (a fixed one in evaluation); the first pass detects those that cannot."""
        device = self._place[0]
        if not train:
            key = torch.full((), EVALUATION, device=device)
        seen = (train, device) in self._guarded
        with contextlib.nullcontext() if seen else Guard(type(self.module).__name__, device), KeyedDraws(key, mask):
            yield
        self._guarded.add((train, device))

    def _replica(self, train: bool) -> nn.Module:
        if not hasattr(self._replicas, "eval"):
            self.ready()
        return self._replicas.train if train else self._replicas.eval

    @property
    def convolves(self) -> bool:
        """Whether the model has 2-d convolutions."""
        return any(isinstance(part, nn.Conv2d) for part in self.module.modules())


def _sharing_copy(module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the module's structure whose parameters are the same tensors, or one copy of them where placed anew.

    Parameters that are trained only hold a place: `functional_call` puts a client's values there.
    """
    shared: dict[int, Any] = {}
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter:  # other types may not be shared
            placed = parameter.detach().to(device, dtype if parameter.is_floating_point() else None)
            shared[id(parameter)] = nn.Parameter(placed, requires_grad=False)
    copied = copy.deepcopy(module, shared).requires_grad_(False)
    return copied if device is None and dtype is None else copied.to(device=device, dtype=dtype)


def _frozen_modules(module: nn.Module) -> tuple[str, ...]:
    """Name prefixes of submodules that own parameters, none of them trainable."""
    return tuple(
        f"{name}."
        for name, part in module.named_modules()
        if name and any(True for _ in part.parameters()) and not any(p.requires_grad for p in part.parameters())
    )


def _features(module: Any, x: Any) -> Tensor:
    return module.features(x)


@contextlib.contextmanager
def _forwarding_to(through: Callable[[nn.Module, Any], Any], module: nn.Module) -> Iterator[None]:
    module.forward = functools.partial(through, module)
    try:
        yield
    finally:
        del module.forward
