"""Recording a function of tensors as a flat graph of operations, and replaying it with little Python overhead.

PyTorch's own `make_fx` records the same operations but first imports a symbolic-shape machinery for a second, and its
replay packs and unpacks nested lists at every call: both show when a step takes half a millisecond.

It pays: untraced, a round of the small MLP takes 1.6 times the CPU time with one client after another and 1.2 times it
batched, of the 2-conv CNN 1.07 and 1.02 times it (benchmarks/compiler_passes.py, one thread).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
Flat = list[Any]  # tensors, and None where there is none
NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)  # change their statistics without saying so
SAME = (aten.detach.default, aten.alias.default)  # their result is their argument, as far as values go
RECURRENT = aten.mkldnn_rnn_layer.default
BY_VALUE = (  # the shape of their result depends on values
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten._pack_padded_sequence.default,
)


class Untraceable(TypeError):
    """The function's operations depend on tensor values, so it cannot be traced."""


class Trace:
    """The recorded operations for one set of shapes; calling it with flat lists of arguments replays them."""

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.rewritten()

    def __call__(self, *arguments: Flat) -> Flat:
        """The function's value."""
        return self.run(*(leaf for flat in arguments for leaf in flat))

    def rewritten(self) -> None:
        """To be called after the graph was changed; it is compiled when it is used next, after the last change."""
        simplify(self.graph)
        self.__dict__.pop("module", None)
        self.__dict__.pop("run", None)

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The graph as a module, which takes all arguments one after another."""
        return fx.GraphModule(self.constants, self.graph)

    @functools.cached_property
    def run(self) -> Callable[..., Flat]:
        """The module's function, past the layers of nn.Module's call."""
        return self.module.forward


def trace(function: Callable[..., Flat], *arguments: Flat) -> Trace:
    """The operations of a function of flat lists, for these shapes; values that vary must be among the arguments."""
    # an object passed twice would be taken for one input
    distinct = [[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat] for flat in arguments]
    record = _Record([leaf for flat in distinct for leaf in flat])
    with record:
        results = function(*distinct)
    record.graph.output([record.node(result) for result in results])
    return Trace(record.graph, record.constants)


class _Record(TorchDispatchMode):
    """Records every operation below vmap and grad, with its input and output tensors."""

    def __init__(self, inputs: Flat) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self._nodes = WeakTensorKeyDictionary()  # by tensor; what is not used any more is freed while recording
        for position, leaf in enumerate(inputs):
            node = self.graph.placeholder(f"input_{position}")
            if isinstance(leaf, Tensor):
                self._know(leaf, node)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compilation while recording: saves the import of the compiler

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is aten._local_scalar_dense.default:
            raise Untraceable("a value was read out of a tensor (.item(), or `if` on a tensor)")
        if op in BY_VALUE or (op is aten.index.Tensor and any(_is_flags(index) for index in args[1])):
            raise Untraceable(f"the shape of a tensor depends on values ({op})")
        kwargs = kwargs or {}
        value = op(*args, **kwargs)
        arguments, options = pytree.tree_map_only(Tensor, self.node, (args, kwargs))
        node = self.graph.call_function(recurrent_layer if op is RECURRENT else op, arguments, options)
        self._know_all(value, node)
        return value

    def node(self, value: Any) -> Any:
        """The node that made a tensor; a tensor from outside is a constant."""
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = value
            self._know(value, self.graph.create_node("get_attr", name))
        return self._nodes[value]

    def _know_all(self, value: Any, node: fx.Node) -> None:
        """All tensors of a result, in lists within a tuple too; numbers and flags are the same for these shapes."""
        if isinstance(value, Tensor):
            self._know(value, node)
        elif isinstance(value, (list, tuple)):
            for position, part in enumerate(value):
                if isinstance(part, (Tensor, list, tuple)):
                    self._know_all(part, self.graph.call_function(operator.getitem, (node, position)))

    def _know(self, value: Tensor, node: fx.Node) -> None:
        node.meta["shape"], node.meta["dtype"] = value.shape, value.dtype
        node.meta["stride"], node.meta["device"] = value.stride(), value.device
        self._nodes[value] = node


def _is_flags(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def recurrent_layer(*args: Any) -> Any:
    """oneDNN's LSTM keeps what its gradient needs only where gradients are on; a replay finds them by itself."""
    with torch.enable_grad():
        return RECURRENT(*args)


def simplify(graph: fx.Graph) -> None:
    """Drop what changes nothing: detached copies, first powers, factors of 1, second transposes and casts, unused."""
    changed = overwritten(graph)
    casts: dict[Any, fx.Node] = {}  # a rate for every parameter, or what several layers read in half precision
    for node in list(graph.nodes):
        if node.target in SAME or _is_first_power(node, changed) or _is_times_one(node, changed):
            node.replace_all_uses_with(node.args[0])
        elif node.target == aten._to_copy.default and _lasts(node, changed):
            node.replace_all_uses_with(casts.setdefault((node.args, tuple(node.kwargs.items())), node))
        elif node.target == aten.ones_like.default and node.meta["shape"] == ():
            # backpropagation's start: without the objective's value, whose terms may be unused
            with graph.inserting_before(node):
                options = {"dtype": node.meta["dtype"], "device": node.meta["device"]}
                one = graph.call_function(aten.full.default, ([], 1.0), options)
            one.meta = dict(node.meta)
            node.replace_all_uses_with(one)
        elif node.target == aten.t.default and node.args[0].target == aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _changes_something(node))


def _is_first_power(node: fx.Node, changed: set[fx.Node]) -> bool:
    if node.target != aten.pow.Tensor_Scalar or node.args[1] != 1:
        return False
    return _keeps_type(node) and _lasts(node, changed)


def _keeps_type(node: fx.Node) -> bool:
    return bool(node.args[0].meta.get("dtype") == node.meta["dtype"])  # type: ignore[union-attr]


def _is_times_one(node: fx.Node, changed: set[fx.Node]) -> bool:
    is_one = bool(node.target == aten.mul.Scalar and node.args[1] == 1)
    return is_one and _lasts(node, changed) and _keeps_type(node)


def _lasts(node: fx.Node, changed: set[fx.Node]) -> bool:
    """Whether neither the value nor its inputs are overwritten."""
    return not changed & {node, *(origin(other) for other in node.all_input_nodes)}


def origin(node: fx.Node) -> fx.Node:
    """The node whose memory this one views, through views of views."""
    while True:
        maker = node.args[0] if node.target is operator.getitem else node  # one of several views
        if not isinstance(maker.target, torch._ops.OpOverload):  # type: ignore[union-attr]
            return node
        returns = maker.target._schema.returns  # type: ignore[union-attr]
        if not returns or returns[0].alias_info is None:
            return node
        node = maker.args[0]  # type: ignore


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Values that some operation changes; operations on them must not be reordered."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in NORMS:
            found.update(origin(value) for value in node.args[3:5] if isinstance(value, fx.Node))
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for argument, value in zip(node.target._schema.arguments, node.args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    some = value if isinstance(value, (list, tuple)) else [value]
                    found.update(origin(one) for one in some)
    return found


def _changes_something(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
