"""Operators of a traced layer with their predicted seconds, ready to be divided into subgraphs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, fx

from megatron_mux.backbone.pieces import MessageKind
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.fusion.device import device_of
from megatron_mux.fusion.graphs.layer_graph import ADAPTER, LayerGraph
from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs, Operator, segment
from megatron_mux.fusion.profiler.core_attention import AttentionCosts
from megatron_mux.fusion.profiler.profile import Profile

_COLLECTIVES: dict[Any, MessageKind] = {
    torch.ops._c10d_functional.all_reduce.default: "all_reduce",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
}
_ALLOCATIONS = ("aten.empty", "aten.new_empty")
_ALIASES = (operator.getitem, torch.ops._c10d_functional.wait_tensor.default)


class OperatorCosts:
    """Predicts the seconds of an operator from its shapes.

    The products of BaseOps, attention and messages are those of the profile. All others are a roofline's, which reads
    and writes memory for each, so that chains of small operators, which our kernels fuse, come out too long.

    Args:
        hidden: H.
    """

    def __init__(self, profile: Profile, hidden: int) -> None:
        about = profile.about
        self.profile = profile
        self._device = device_of(about["kind"], about["device"], about["threads"])
        self._attention = AttentionCosts(profile.curves)
        self._hidden = hidden

    def seconds(self, node: fx.Node, kind: str, module: str, backward: bool) -> float:
        """Predict the seconds of one operator.

        Args:
            node: A node of a traced graph.
            kind: See `Operator.kind`.
        """
        given = [_value(source) for source in node.all_input_nodes]
        made = [_value(user) for user in node.users] if _value(node) is None else [_value(node)]
        tensors = [tensor for tensor in (*given, *made) if tensor is not None]
        elements = max((tensor.numel() for tensor in tensors), default=0)
        if kind in get_args(MessageKind):
            whole = self.profile.curves["all_reduce"].at(elements / self._hidden)[0]
            return whole if kind == "all_reduce" else whole / 2
        name = str(node.target)
        if "scaled_dot_product" in name:
            query = given[0] if not backward else given[1]
            assert query is not None
            seconds = self._attention.of(query.shape[-2], 0) + self._attention.launch
            return float(seconds[int(backward)])
        is_product = name in ("aten.mm.default", "aten.addmm.default")
        if is_product and kind == "compute" and module in BASE_OPS:
            return self.profile.curves[module].at(tensors[-1].shape[0])[int(backward)]
        flops = elements
        if is_product:  # `[m, k]`, perhaps after a bias, times `[k, n]`
            flops = 2 * tensors[-1].numel() * tensors[-2].shape[0]
        traffic = sum(tensor.nbytes for tensor in tensors)
        itemsize = max(2, *(tensor.element_size() for tensor in tensors))  # masks are narrower
        return self._device.seconds(flops, traffic, itemsize)


def operators_of(graph: fx.Graph, costs: OperatorCosts, backward: bool) -> list[Operator]:
    """List the operators of a graph, in its order. Views and waits, which compute nothing, are left out.

    Args:
        graph: Of a `LayerGraph`.
        costs: Predicts their seconds.
    """
    source: dict[fx.Node, str] = {}  # of each node, the operator whose result it is
    kinds: dict[str, str] = {}
    operators: list[Operator] = []
    for node in graph.nodes:
        if node.op != "call_function" or str(node.target).startswith(_ALLOCATIONS):
            continue
        if node.target is torch.ops.aten.copy.default:  # of what a wait returned to where it came from
            node_of_result = node.args[1]
        elif node.target in _ALIASES or getattr(node.target, "is_view", False):
            node_of_result = node.args[0]
        else:
            node_of_result = None
        if node_of_result is not None:
            if node_of_result in source:
                source[node] = source[node_of_result]
            continue
        inputs = tuple(dict.fromkeys(source[n] for n in node.all_input_nodes if n in source))
        module = _module(node)
        kind: Any = _COLLECTIVES.get(node.target) or _side(node, [kinds[name] for name in inputs])
        parts = [module, ADAPTER if kind == "adapter" and module else "", node.name]
        name = ".".join(part for part in parts if part)
        seconds = costs.seconds(node, kind, module, backward)
        given = _value(node.all_input_nodes[0]) if kind in get_args(MessageKind) else None
        operators.append(Operator(name, kind, inputs, seconds, 0 if given is None else given.nbytes))
        source[node], kinds[name] = name, kind
    return operators


def layer_subgraphs(
    traced: LayerGraph,
    profile: Profile,
    hidden: int,
    layers: Sequence[int],
    rows: int,
    sequence_parallel: bool,
) -> LayerSubgraphs:
    """Divide a traced layer into subgraphs.

    Args:
        profile: Seconds of operators at its tensor-parallel degree.
        hidden: H.
        layers: Which layers it stands for.
        rows: T.
    """
    costs = OperatorCosts(profile, hidden)
    return LayerSubgraphs(
        tuple(layers),
        rows,
        int(profile.about["tensor_parallel"]),
        sequence_parallel,
        profile.description,
        segment(operators_of(traced.forward.graph, costs, backward=False)),
        segment(operators_of(traced.backward.graph, costs, backward=True)),
    )


def _side(node: fx.Node, before: Sequence[str]) -> str:
    """Whether a node belongs to the backbone or to adapters; sums of gradients to what they sum."""
    if not node.meta.get("nn_module_stack") and not node.meta.get("fwd_nn_module_stack"):
        return "adapter" if before and set(before) == {"adapter"} else "compute"
    return "adapter" if ADAPTER in (node.meta.get("custom") or {}) else "compute"


def _module(node: fx.Node) -> str:
    """The last part of the path of the module that a node belongs to; empty if it sums gradients of several."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(iter(reversed(stack.values())), ("",))[0]
    return str(path).rpartition(".")[2] if "." in str(path) else "layer" * bool(path)


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None
