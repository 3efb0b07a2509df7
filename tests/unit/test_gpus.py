"""The one table of GPUs: by their own names, for kernels and for speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mux.errors import UserError
from megatron_mux.fusion.device import device_of
from megatron_mux.gpus import ALLOCATOR_OPTIONS, ALLOCATOR_VARIABLES, GPUS, TABLE_VARIABLE, Gpu, find, known


@pytest.mark.parametrize(
    ("name", "gpu", "half"),
    [
        ("H100", Gpu((9, 0), True), 989e12),
        ("NVIDIA H200", Gpu((9, 0), True), 989e12),
        ("nvidia b200", Gpu((10, 0), True), 2250e12),
        ("A100-SXM4-80GB", Gpu((8, 0), False), 312e12),
        ("A10", Gpu((8, 6), False), 125e12),
        ("NVIDIA L40", Gpu((8, 9), False), 181e12),
        ("NVIDIA GH200 480GB", Gpu((9, 0), True), 989e12),
        ("Tesla V100-SXM2-16GB", Gpu((7, 0), False), 125e12),
        ("NVIDIA A100 80GB PCIe", Gpu((8, 0), False), 312e12),
    ],
)
def test_a_longer_part_of_a_name_counts_first(name: str, gpu: Gpu, half: float) -> None:
    assert known(name).gpu == gpu
    assert device_of("cuda", name, 0).peak[2] == half


def test_what_is_not_known() -> None:
    for other in ("H9000", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA RTX A4000", "GT 40900"):
        assert find(other) is None, other
    with pytest.raises(UserError, match=f"--device H9000: is not known: choose from cpu, {', '.join(GPUS)}"):
        known("H9000", "cpu")
    unknown = device_of("cuda", "some new GPU", 0)
    assert unknown.peak[2] == known("A100").half
    assert unknown.name.startswith("some new GPU (not in the table of GPUs, taken for an A100")


def test_a_users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(
        '["H9000"]\nlike = "H100"\nlink_gb_s = 1800\n["A100 PCIe"]\nlike = "A100"\nlink_gb_s = 32\n'
    )
    monkeypatch.setenv(TABLE_VARIABLE, str(file))
    assert known("NVIDIA H9000 SXM") == GPUS["H100"]._replace(link=1800e9)
    assert known("NVIDIA A100 PCIe").link == 32e9 and known("A100-SXM4-80GB").link == 300e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("H9000 = ", "is no table of GPUs"),
        ("H9000 = 5", "is no table of GPUs"),
        ('[H9000]\nlike = "H1"', "like: must be one of B200"),
        ('[H9000]\nlike = "H100"\nlink = 5', "link: unknown key"),
        ('[H9000]\nlike = "H100"\nlink_gb_s = "fast"', "must be a number above 0, got 'fast'"),
        (None, "No such file"),
    ],
)
def test_a_users_table_that_is_none(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpus.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(TABLE_VARIABLE, str(file))
    with pytest.raises(UserError, match=f"{TABLE_VARIABLE} .*gpus.toml: .*{said}"):
        known("H9000")


def test_groups_beyond_a_node_have_the_network() -> None:
    h100, l40s = (device_of("cuda", name, 0) for name in ("H100", "L40S"))
    assert h100.link_over(8) == pytest.approx(0.8 * 450e9) and h100.link_over(16) == pytest.approx(0.8 * 50e9)
    assert l40s.link_over(8) == pytest.approx(0.8 * 32e9)
    assert device_of("cpu", "", 2).link_over(64) == device_of("cpu", "", 2).link


def test_speeds_are_of_the_right_order() -> None:
    for name, one in GPUS.items():
        assert 1.5 < one.half / one.single < 40, name
        assert 30 < one.half / one.bandwidth < 450, f"{name}: operations a byte"


RUN = "import pretrain_mux as command; words = ['--backbone', '.', '--mux-tasks', 'setup.py']"
PROFILE = "from megatron_mux.cli import profile as command; words = ['--backbone', '.']"


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (RUN, {}),
        (RUN, {"PYTORCH_ALLOC_CONF": ""}),
        (RUN, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
        (PROFILE, {}),
    ],
)
def test_a_run_sets_the_allocator_before_torch_unless_the_user_has(
    command: str, given: dict[str, str]
) -> None:
    code = (
        f"import os, sys\n{command}\n"
        f"print([os.environ.get(name) for name in {ALLOCATOR_VARIABLES}])\n"
        "sys.modules['torch'] = None  # its import fails\n"
        "try: command.main(words)\n"
        "except ImportError: pass\n"
        f"print([os.environ.get(name) for name in {ALLOCATOR_VARIABLES}])\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": ".", **given},
        capture_output=True,
        check=True,
    )
    before, after = done.stdout.decode().splitlines()
    assert before == str([given.get(name) for name in ALLOCATOR_VARIABLES])
    assert after == (before if given else str([ALLOCATOR_OPTIONS, None]))
