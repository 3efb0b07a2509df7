"""A backbone's stored weights by the paths that adapters use, and what is to become of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.backbone.resolve import expected
from megatron_mux.errors import UserError

Change = Callable[[Tensor], Tensor]
"""Makes a new value of a weight in fp32 (fp64 if it is stored so); of linear modules, `[out, in]`."""


@dataclass(eq=False)
class Changes:
    """The changes of a merge, in the order in which they apply.

    Attributes:
        info: Of the backbone.
        sizes: Shape of each tensor by its full Hugging Face name, as it is stored.
        of: Changes by full name; the output layer has its own even if it is the embedding.
    """

    info: BackboneInfo
    sizes: dict[str, tuple[int, ...]]
    of: dict[str, list[Change]] = field(default_factory=dict)

    @classmethod
    def of_backbone(cls, info: BackboneInfo) -> Changes:
        """No changes yet."""
        sizes, names = expected(info.shape), info.shape.names
        if info.shape.tied:
            sizes[f"{names.head}.weight"] = sizes[f"{names.embedding}.weight"]
        return cls(info, sizes)

    @property
    def embedding(self) -> str:
        """Name of the embedding's weight."""
        return f"{self.info.shape.names.embedding}.weight"

    @property
    def head(self) -> str:
        """Name of the output layer's weight."""
        return f"{self.info.shape.names.head}.weight"

    @property
    def unties(self) -> bool:
        """Whether the output layer was the embedding, and no longer is."""
        return self.info.shape.tied and self.of.get(self.head, []) != self.of.get(self.embedding, [])

    def is_transposed(self, name: str) -> bool:
        """Whether a linear module's weight is stored `[in, out]`."""
        shape = self.info.shape
        layers = shape.names.layer.partition("{}")[0]
        return shape.names.transposed and name.startswith(layers) and len(self.sizes[name]) == 2

    def name(self, path: str, leaf: str = "weight") -> str | None:
        """Full name of a module's weight; None if the backbone has none."""
        experts = self.info.shape.experts
        if experts is not None and path.endswith(f".{experts.names.router}"):
            path = path.removesuffix(experts.names.router) + experts.names.stored_router
        name = f"{path}.{leaf}"
        return name if name in self.sizes else None

    def size(self, path: str, why: str) -> tuple[int, int]:
        """Output and input width of a linear module (of an embedding, its rows and columns).

        Args:
            path: The module.
            why: The adapter's tensor that asks for it, for the message.

        Raises:
            UserError: The backbone has no such module.
        """
        name = self.name(path)
        if name is None:
            raise UserError(
                f"{why}: the backbone {self.info.path} has no {path}: give the one it was trained on."
            )
        size = self.sizes[name]
        return (size[1], size[0]) if self.is_transposed(name) else (size[0], size[1])

    def add(self, path: str, change: Change, leaf: str = "weight", shared: bool = False) -> None:
        """Add a change of a module's weight, which `name` knows.

        Args:
            path: The module.
            change: What it does.
            leaf: Which of its tensors.
            shared: Whether, of an embedding that is also the output layer, it changes both.
        """
        name = self.name(path, leaf)
        assert name is not None, path
        self.of.setdefault(name, []).append(_on_transposed(change) if self.is_transposed(name) else change)
        if shared and self.info.shape.tied and name in (self.embedding, self.head):
            other = self.head if name == self.embedding else self.embedding
            self.of.setdefault(other, []).append(self.of[name][-1])

    def replace(self, name: str, value: Callable[[], Tensor], shared: bool = False) -> None:
        """Replace a whole tensor before all other changes, as it is stored.

        Args:
            name: Its full name.
            value: Reads what takes its place.
            shared: See `add`.
        """
        change: Change = lambda _: value()
        names = {name}
        if shared and self.info.shape.tied and name in (self.embedding, self.head):
            names |= {self.embedding, self.head}
        for each in names:
            self.of.setdefault(each, []).insert(0, change)

    def add_to_experts(self, path: str, change: Callable[[int, slice], Change], down: bool) -> None:
        """Add a change of each routed expert of a layer.

        Args:
            path: Of all experts of a layer, in transformers.
            change: Gives the change of an expert by its number, and by the rows of the projection in transformers,
                where gate and up projections are one, `[2 F, H]`.
            down: Whether it changes down projections, or gate and up projections.
        """
        experts = self.info.shape.experts
        assert experts is not None
        layer, width = path.removesuffix(f".{experts.names.fused}"), experts.ffn
        leaves = {experts.names.gate: slice(0, width), experts.names.up: slice(width, 2 * width)}
        if down:
            leaves = {experts.names.down: slice(None)}
        for expert in range(experts.count):
            module = f"{layer}.{experts.names.stored.format(expert)}"
            for leaf, rows in leaves.items():
                self.add(f"{module}.{leaf}", change(expert, rows))


def _on_transposed(change: Change) -> Change:
    return lambda weight: change(weight.t()).t()
