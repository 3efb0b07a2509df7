"""How the ranks of a run are divided, and which layers each pipeline stage has."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mux.backbone.split import Split, even_split, stage_layers


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Ranks of a pipeline.
        data: Pipelines.
        split: Layers of each stage; empty: one stage per rank, with as even numbers of layers as possible.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    split: Split = ()

    @property
    def ranks(self) -> int:
        """All ranks of the run."""
        return self.tensor * self.pipeline * self.data

    @property
    def stages(self) -> int:
        """Stages of a pipeline, virtual ones included."""
        return len(self.split) or self.pipeline

    @property
    def virtual(self) -> int:
        """Stages per rank."""
        return self.stages // self.pipeline

    @property
    def flags(self) -> list[str]:
        """Command-line flags of a run; data parallelism follows from the number of processes."""
        words = []
        if self.tensor > 1:
            words += ["--tensor-model-parallel-size", str(self.tensor)]
        if self.pipeline > 1:
            words += ["--pipeline-model-parallel-size", str(self.pipeline)]
        return words

    def stage_layers(self, layers: int) -> list[range]:
        """The layers of each stage of a backbone with `layers` layers."""
        return stage_layers(self.split or even_split(layers, self.pipeline))
