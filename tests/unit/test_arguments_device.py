"""Flags that must go with the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mux.errors import UserError
from tests.unit.parsed import parse


@pytest.mark.usefixtures("place")
def test_a_backend_must_go_with_the_device() -> None:
    parse().check_device("cpu")
    parse("--distributed-backend", "gloo").check_device("cpu")
    with pytest.raises(UserError, match="processes on CPUs communicate over gloo"):
        parse("--distributed-backend", "nccl").check_device("cpu")
    with pytest.raises(UserError, match="processes on GPUs communicate over nccl"):
        parse("--distributed-backend", "gloo").check_device("cuda")


@pytest.mark.usefixtures("place")
def test_ctas_of_messages_are_for_gpus_that_exchange_some() -> None:
    given = parse("--mux-communication-ctas", "4", "--tensor-model-parallel-size", "2")
    given.check_device("cuda")
    with pytest.raises(UserError, match="--mux-communication-ctas: bounds messages between GPUs"):
        given.check_device("cpu")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "kind", "stored", "has_bf16", "wanted", "said"),
    [
        ("", "cuda", "bfloat16", True, "bfloat16", ""),
        (
            "",
            "cuda",
            "float32",
            True,
            "float32",
            "in fp32, since its config.json says float32: --bf16 or --mux-tf32",
        ),
        ("", "cuda", "float16", True, "float32", "says float16: --bf16"),
        ("", "cuda", None, True, "float32", "says no dtype: --bf16"),
        ("", "cuda", "bfloat16", False, "float32", "this GPU has no bfloat16"),
        ("--mux-fp32", "cuda", "bfloat16", True, "float32", ""),
        ("--mux-fp32 --mux-tf32", "cuda", "bfloat16", True, "float32", ""),
        ("--bf16", "cuda", "float32", True, "bfloat16", ""),
        ("", "cpu", "bfloat16", True, "float32", ""),
        ("--bf16", "cpu", "float32", True, "bfloat16", ""),
    ],
)
def test_the_dtype_is_the_checkpoints_on_a_gpu(
    words: str, kind: str, stored: str | None, has_bf16: bool, wanted: str, said: str
) -> None:
    chosen, found = parse(*words.split()).on_device(kind, stored, has_bf16)
    assert str(chosen.dtype) == f"torch.{wanted}"
    assert said in found and bool(said) == bool(found)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "kind", "stored", "has_bf16", "said"),
    [
        ("--bf16", "cuda", "float32", False, "--bf16: this GPU does not compute in bfloat16: use --mux-fp32"),
        ("--mux-tf32", "cpu", "float32", True, "--mux-tf32: a CPU has no TF32"),
        ("--mux-tf32", "cuda", "bfloat16", True, "--mux-tf32: the backbone computes in bfloat16"),
    ],
)
def test_a_dtype_must_go_with_the_device(
    words: str, kind: str, stored: str, has_bf16: bool, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        parse(*words.split()).on_device(kind, stored, has_bf16)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [("--bf16", "bfloat16"), ("--mux-fp32", "float32"), ("--mux-fp32 --mux-tf32", "float32 with TF32")],
)
def test_the_precision_of_a_run(words: str, wanted: str) -> None:
    assert parse(*words.split()).precision == wanted


def test_tf32_on_a_cpu_is_refused_before_a_file_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_mux.training.run import run

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = parse("--mux-tf32")
    (place / "tasks.yaml").unlink()
    with pytest.raises(UserError, match="--mux-tf32: a CPU has no TF32"):
        run(arguments)
