"""How the ranks of a run are divided, which layers each pipeline stage has, and the ways to divide that there are."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mux.backbone.split import Split, even_split, stage_layers
from megatron_mux.errors import UserError
from megatron_mux.expert_ranks import size_problems
from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run.

    Attributes:
        data: Pipelines.
        split: Layers of each stage; empty: one stage per rank, with as even numbers of layers as possible.
        expert_tensor: Ranks that share each expert; None: the backbone has none.
        managers: Processes that hold the routed experts and nothing else, besides the one rank; 0: none.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    split: Split = ()
    expert: int = 1
    expert_tensor: int | None = None
    managers: int = 0

    @property
    def ranks(self) -> int:
        """All ranks of the run."""
        return self.tensor * self.pipeline * self.data + self.managers

    @property
    def exchanges(self) -> bool:
        """Whether rows go to other ranks for their experts."""
        return self._expert_ranks > 1 or self.managers > 0

    @property
    def over_data(self) -> bool:
        """Whether pipelines compute the experts of each other's rows."""
        return self._expert_ranks > self.tensor

    @property
    def predicts_memory(self) -> bool:
        """Whether its memory can be predicted: not that of expert managers and their master, nor of tensor ranks that
        hold more of the experts than their part."""
        return not self.managers and (self.expert_tensor is None or self._expert_ranks >= self.tensor)

    def refuse_memory_limit(self, flag: str) -> None:
        """Refuse a limit of memory that is not predicted.

        Args:
            flag: That gives the limit.

        Raises:
            UserError: It is not: see `predicts_memory`.
        """
        if not self.predicts_memory:
            raise UserError(
                f"{flag}: memory is not predicted for expert managers, nor for tensor ranks that hold whole experts "
                "unless enough expert ranks divide them: remove it"
            )

    def refuse_residence(self, flag: str, residence: str) -> None:
        """Refuse weights that pipelines share out though their experts differ.

        Args:
            flag: That says where weights are.
            residence: What it says.

        Raises:
            UserError: They do.
        """
        if residence.startswith("sharded") and self.over_data:
            raise UserError(
                f"{flag} {residence}: divides weights over pipelines, but the experts of these differ: use resident or "
                "offloaded"
            )

    @property
    def _expert_ranks(self) -> int:
        """Ranks that together hold each expert once."""
        return self.expert * (self.expert_tensor or 1)

    @property
    def stages(self) -> int:
        """Stages of a pipeline, virtual ones included."""
        return len(self.split) or self.pipeline

    @property
    def virtual(self) -> int:
        """Stages per rank."""
        return self.stages // self.pipeline

    @property
    def description(self) -> str:
        """How ranks are divided, for people."""
        words = [f"{self.tensor} tensor rank(s)", f"{self.data} pipeline(s)"]
        if self.managers:
            words.append(f"{self.managers} expert manager(s)")
        elif self.expert_tensor is not None:
            shared = f" of {self.expert_tensor} tensor ranks each" if self.expert_tensor > 1 else ""
            words.append(f"{self.expert} expert rank(s){shared}")
        return ", ".join(words)

    @property
    def flags(self) -> list[str]:
        """Command-line flags of a run; data parallelism follows from the number of processes."""
        words = []
        if self.tensor > 1:
            words += ["--tensor-model-parallel-size", str(self.tensor)]
        if self.pipeline > 1:
            words += ["--pipeline-model-parallel-size", str(self.pipeline)]
        if self.expert > 1:
            words += ["--expert-model-parallel-size", str(self.expert)]
        if self.expert_tensor not in (None, self.tensor):
            words += ["--expert-tensor-parallel-size", str(self.expert_tensor)]
        if self.tensor > 1 and self.expert_tensor is not None:
            words.append("--sequence-parallel")
        if self.managers:
            words += ["--mux-expert-managers", str(self.managers)]
        return words

    def stage_layers(self, layers: int) -> list[range]:
        """The layers of each stage of a backbone with `layers` layers."""
        return stage_layers(self.split or even_split(layers, self.pipeline))


def possible_meshes(
    shape: BackboneShape, ranks: int, virtual: int = 1, whole_experts: bool = False
) -> list[Mesh]:
    """List the ways to divide so many ranks.

    Args:
        virtual: Pipeline stages of each rank, where there are several ranks to a pipeline.
        whole_experts: Whether tensor ranks may not divide an expert; else they divide each as they do layers.
    """
    meshes = []
    for tensor in _divisors(ranks):
        for pipeline in _divisors(ranks // tensor):
            stages = pipeline * (virtual if pipeline > 1 else 1)
            mesh = Mesh(tensor, pipeline, ranks // (tensor * pipeline))
            if shape.experts is None:
                if not shape.parallel_problems(tensor, stages):
                    meshes.append(mesh)
                continue
            share = 1 if whole_experts else tensor
            for expert in _divisors(ranks // (pipeline * share)):
                if not (
                    shape.parallel_problems(tensor, stages, expert, share)
                    or size_problems(ranks, tensor, pipeline, expert, share)
                ):
                    meshes.append(Mesh(tensor, pipeline, mesh.data, expert=expert, expert_tensor=share))
    return meshes


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
