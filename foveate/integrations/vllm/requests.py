"""A request's own setting: with ``extra_args={"foveate": "dense"}`` the tokens that it decodes read every key.

vLLM hands sampling parameters to its model runners and to no attention backend. So each runner notes which of its
requests are dense, and publishes which rows of a batch are theirs before it asks the backend for metadata. The process
that takes requests refuses other values, because an error in a runner would end the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

NAME, DENSE = "foveate", "dense"

_rows: list[bool] | None = None
"""Of the present batch, see :func:`dense_rows`."""


def dense_rows() -> list[bool] | None:
    """Which rows of the present batch belong to dense requests, without its rows of padding; None: no row."""
    return _rows


def is_dense(params: Any) -> bool:
    """Whether a request with vLLM's sampling parameters is dense; pooling requests have none, and are not.

    A value that a frontend other than vLLM's own has let through counts as dense, which loses no accuracy.
    """
    return NAME in (getattr(params, "extra_args", None) or {})


def check_request(params: Any, vllm_config: Any) -> None:
    """Refuse a setting that is unknown, or that the engine cannot honour.

    Raises:
        VLLMValidationError: which servers answer with status 400. Of other errors they hide the message.
    """
    from vllm.exceptions import VLLMValidationError

    if not is_dense(params):
        return
    if (given := params.extra_args[NAME]) != DENSE:
        raise VLLMValidationError(
            f'foveate: a request\'s extra_args["{NAME}"] (vllm_xargs) must be "{DENSE}", not {given!r}'
        )
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise VLLMValidationError(f'foveate: extra_args["{NAME}"]="{DENSE}" is not supported with microbatches')


def install_check() -> None:
    """Have this process refuse requests by :func:`check_request` when vLLM validates them."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap_once(InputProcessor, "_validate_params", _with_check)


def install(second: bool) -> None:
    """Have this process's model runner, V2 if ``second``, keep :func:`dense_rows` up to date."""
    if second:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        wrap_once(GPUModelRunner, "add_requests", _tracking_requests)
        wrap_once(GPUModelRunner, "prepare_attn", _publishing_rows(lambda runner, batch: batch.req_ids))
        wrap_once(GPUModelRunner, "prepare_dummy_attn", _publishing_rows(lambda *given: ()))
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        wrap_once(GPUModelRunner, "_update_states", _tracking_requests)
        wrap_once(
            GPUModelRunner,
            "_build_attention_metadata",
            _publishing_rows(lambda runner, *given: runner.input_batch.req_ids),
        )


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a method of a class, or a function of a module, once in a process."""
    inner = getattr(owner, name)
    if not getattr(inner, "wrapped_by_foveate", False):
        wrapped = functools.wraps(inner)(wrapper(inner))
        wrapped.wrapped_by_foveate = True
        setattr(owner, name, wrapped)


def _with_check(inner: Callable[..., Any]) -> Callable[..., Any]:
    def validate(processor: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check_request(params, processor.vllm_config)
        return inner(processor, params, *args, **kwargs)

    return validate


def _tracking_requests(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that takes a scheduler's output. A preempted request stays, or comes again as a new one."""

    def update(runner: Any, output: Any) -> Any:
        dense = _dense_of(runner)
        dense -= output.finished_req_ids
        for new in output.scheduled_new_reqs:
            (dense.add if is_dense(new.sampling_params) else dense.discard)(new.req_id)
        return inner(runner, output)

    return update


def _dense_of(runner: Any) -> set[str]:
    """Requests of a runner that are dense."""
    return runner.__dict__.setdefault("foveate_dense", set())


def _publishing_rows(requests_of: Callable[..., Sequence[str]]) -> Callable[..., Any]:
    """A wrapper of the method that a runner calls before it asks for metadata.

    Args:
        requests_of: gives the requests of the batch's rows, from the runner and the method's arguments.
    """

    def wrapper(inner: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(runner: Any, *args: Any, **kwargs: Any) -> Any:
            global _rows
            dense = _dense_of(runner)
            rows = [request in dense for request in requests_of(runner, *args)] if dense else []
            _rows = rows if any(rows) else None
            return inner(runner, *args, **kwargs)

        return prepare

    return wrapper
