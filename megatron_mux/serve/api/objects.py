"""Rows of the database as OpenAI's objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_mux.serve.channel.messages import LogProb, TokenLogProb
from megatron_mux.serve.database.tables import Checkpoint, Event, Job, StoredFile


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": None,
    }


def job_object(job: Job) -> dict[str, Any]:
    """A job; behind OpenAI's fields those of our own."""
    answer = job.answer
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "finished_at": _second(job.finished_at),
        "model": job.backbone,
        "fine_tuned_model": job.model,
        "organization_id": job.tenant_id,
        "result_files": list(job.result_files),
        "status": job.status,
        "trained_tokens": job.trained_tokens,
        "training_file": answer["training_file"],
        "validation_file": answer["validation_file"],
        "hyperparameters": answer["hyperparameters"],
        "seed": answer["seed"],
        "error": job.error,
        "method": answer["method"],
        "metadata": answer["metadata"],
        "integrations": [],
        "estimated_finish": _second(job.estimated_finish),
        "user_provided_suffix": answer["suffix"],
        "estimated_start": _second(job.estimated_start),
        "reason": job.reason,
        "desired": job.desired,
        "priority": job.priority,
        "step": job.step,
        "total_steps": job.total_steps,
    }


def event_object(event: Event) -> dict[str, Any]:
    """An event of a job."""
    return {
        "id": f"ftevent-{event.number}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": event.data,
    }


def checkpoint_object(
    checkpoint: Checkpoint, model: str, train: Mapping[str, Any], evaluated: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint of a job.

    Args:
        checkpoint: Its row.
        model: The name under which it can be used.
        train: Metrics of its step; empty: there are none.
        evaluated: Metrics of the evaluation after its step; empty: there was none.
    """
    loss, accuracy = evaluated.get("eval_loss"), evaluated.get("eval_token_accuracy")
    return {
        "id": checkpoint.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(checkpoint.created_at),
        "step_number": checkpoint.step,
        "fine_tuning_job_id": checkpoint.job_id,
        "fine_tuned_model_checkpoint": f"{model}:ckpt-step-{checkpoint.step}",
        "metrics": {
            "step": checkpoint.step,
            "train_loss": train.get("loss"),
            "train_mean_token_accuracy": train.get("token_accuracy"),
            # The whole validation file is evaluated each time.
            "valid_loss": loss,
            "valid_mean_token_accuracy": accuracy,
            "full_valid_loss": loss,
            "full_valid_mean_token_accuracy": accuracy,
        },
    }


def model_object(name: str, created: float, owner: str) -> dict[str, Any]:
    """A model."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


def fingerprint(backbone: str, adapter: str) -> str:
    """Names the weights that answer: the backbone and the directory of the adapter."""
    return "fp_" + hashlib.sha256(f"{backbone}\n{adapter}".encode()).hexdigest()[:10]


def choice_object(
    index: int,
    message: Mapping[str, Any],
    log_probs: Sequence[TokenLogProb] | None,
    finish: str | None,
    place: str = "message",
) -> dict[str, Any]:
    """A choice of a chat completion.

    Args:
        index: Its number.
        message: What the assistant says.
        log_probs: Of the tokens; None: they were not asked for.
        finish: Why it ended, if it has.
        place: The name of the field that has the message: `message`, or `delta` in a stream.
    """
    shown = None if log_probs is None else [_chosen_token(token) for token in log_probs]
    return {
        "index": index,
        place: dict(message),
        "logprobs": None if shown is None else {"content": shown, "refusal": None},
        "finish_reason": finish,
    }


def usage_object(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """What a chat completion took."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _chosen_token(token: TokenLogProb) -> dict[str, Any]:
    return {**_token(token), "top_logprobs": [_token(other) for other in token.top]}


def _token(token: LogProb) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.log_prob, "bytes": token.bytes}


def _second(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
