"""Tables of bytes against dry runs of deeper stages at other sizes, and against a GPU's peak: parts of benchmarks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.forked import Server
from tests.end_to_end.table_cases import Case, compare
from tests.end_to_end.test_benchmark import result_of

pytestmark = pytest.mark.usefixtures("warm_workers")

CASES = (
    Case("llama", ("LORA",), "PP2", layers=8),
    Case("gemma3_text", ("IA3",), "PP2", layers=3),
    Case("mixtral", ("LORA on experts",), "EP2", layers=6),
    Case("gpt2", ("LORA with dropout",), "TP2", "recomputed", layers=8),
    Case("qwen3", ("LORA",), chunk=900, layers=7),
    Case("qwen3", ("DPO",), "DP2 sharded", layers=8),
    Case("qwen3", ("DPO",), "PP2", layers=8),  # its messages have rows of references, too
    Case("llama", ("DIFF_PRUNING",), "DP2 sharded", layers=4),  # its gradients fill the buffer that sums them
    Case("gemma3_text", ("VERA",), saving="NF4", layers=6),
    Case("qwen3", ("LOHA",), "TP2", layers=6),
    Case("llama", ("PREFIX_TUNING", "BOTTLENECK", "DoRA"), saving="offloaded", layers=6),
    Case("qwen3_moe", ("LORA on experts",), "TP2 sequence parallel", layers=6),
    Case("llama", ("LORA with dropout",), "DP2", "recomputed", layers=6, dtype="float32"),
)

_BELOW = 0.005
"""Of chunks, gradients of earlier keys and values come on top, and in pipelines some messages; all else is exact."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peaks_are_those_of_dry_runs(case: Case, tmp_path: Path) -> None:
    for one in compare(case, tmp_path):
        print(one)
        assert -_BELOW <= one.off <= 0.001
        assert abs(one.off_lasting) <= 0.001


def test_a_cpu_takes_short_and_long_sequences_otherwise(tmp_path: Path) -> None:
    usual = Case("gpt2", ("IA3",), layers=6, device="cpu")
    for case in (usual, replace(usual, lengths=(16, 200))):
        for one in compare(case, tmp_path):
            print(one)
            assert -_BELOW <= one.off <= 0.001
            # Its attention keeps masks of the lengths that it had: of short records they are a larger share.
            assert abs(one.off_lasting) <= (0.001 if case == usual else 0.002)


def test_a_peak_of_a_gpu_is_foretold(tmp_path: Path, server: Server) -> None:
    command = [server.python, "benchmarks/gpu_peaks.py", "--only", "in chunks", "--tolerance", "0.001"]
    result = result_of([*command, "--output", str(tmp_path / "result.json")], tmp_path)
    assert list(result["rows"]) == ["q v, 4k to 8k tokens in chunks"]
    assert "NVIDIA H200" in (tmp_path / "result.md").read_text()
