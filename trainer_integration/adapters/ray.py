"""Save in Ray Train with this library's manager, so that Ray knows each durable checkpoint.

The run's folder is that of Ray's experiment, `RunConfig(storage_path=, name=)`: `Result.checkpoint`
and `ray.train.get_checkpoint()` name the checkpoints that the manager has made durable there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, ConfigurationError, SaveFailed
from ckpt.format.names import last_segment
from ckpt.trainer_integration import manager
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.keeping import KeepRule
from ckpt.trainer_integration.run.restore import Restored
from ckpt.trainer_integration.saving import SaveRule

require_host("ray", oldest="2.51", before="2.70")

import ray.train
from ray.train.v2._internal.execution.context import get_train_context

__all__ = ["CheckpointManager", "url_of"]

_logger = logging.getLogger(__name__)
_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "abfs"}
"""Of pyarrow's file systems, as this library's URLs have them."""
_MARK = "reported-to-ray"
"""Stays in the folder of a removed checkpoint: Ray starts no run again that lists a folder which is gone."""


class CheckpointManager(manager.CheckpointManager):
    """Save a run of Ray Train while it goes on: `ckpt.CheckpointManager`, made in the training function.

    Each checkpoint is reported to Ray once it is durable: when the next save begins, at
    `wait_durable()`, or at the end of the `with` block; with `async_mode="off"`, at once. All workers
    meet there, as in `ray.train.report`. When Ray announces that it will drain a node, the
    manager saves after that step, waits until this is durable, and training goes on until Ray
    restarts it elsewhere: do not leave the loop, or the run counts as finished.

    Args:
        save, keep: as for `ckpt.CheckpointManager`. Leave `CheckpointConfig(num_to_keep=)` of Ray
            alone: it deletes folders, not checkpoints.
        preemption_every_steps: how often to ask for such announcements: all workers meet then.
        options: all others of `ckpt.CheckpointManager`.

    Raises:
        ConfigurationError: this is no worker of Ray Train, `async_mode` is "process", Ray's own
            retention is on, or its file system has no URL here, or another S3 endpoint.
    """

    def __init__(
        self,
        *,
        save: SaveRule | int,
        keep: KeepRule | int | None = None,
        preemption_every_steps: int = 1,
        **options: Any,
    ) -> None:
        if options.get("async_mode") == "process":
            raise ConfigurationError(
                "async_mode='process' needs a script, which Ray's workers lack: use 'thread'"
            )
        self._storage = _storage()
        self._pending: tuple[int, str, dict[str, Any]] | None = None
        self._preemption_every_steps, self._drained = preemption_every_steps, set[str]()
        self._is_off = options.get("async_mode") == "off"
        self._folder = self._storage.experiment_fs_path
        url = _url(self._storage.storage_filesystem, self._folder)
        _check_endpoint(self._storage.storage_filesystem, url, options.get("storage_options"))
        super().__init__(url, save=save, keep=keep, **options)

    def restore(self, *arguments: Any, **options: Any) -> Restored | None:
        restored = super().restore(*arguments, **options)
        if restored is not None and not restored.is_initial:
            path = f"{self._folder}/{last_segment(restored.url)}"
            known = ray.train.get_checkpoint()
            if known is None or known.path != path:  # the run died before it was reported
                self._pending = restored.step, path, {}
                self._report()
        return restored

    def step(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        last: bool = False,
        rng: bool = True,
        **parts: Any,
    ) -> bool:
        begun = super().step(step, state, metrics=metrics, last=last, rng=rng, **parts)
        ask = getattr(ray.train, "get_preemption_info", None)  # Ray before 2.60 may lack it
        if ask is None or step % self._preemption_every_steps:
            return begun
        info = ask()
        if info is None or self._drained.issuperset(info.preempted_node_ids):
            return begun
        self._drained.update(info.preempted_node_ids)
        _logger.warning("Ray drains nodes with the ranks %s: saving step %d", info.preempted_ranks, step)

        def patience_s() -> float | None:
            return max(0.0, info.deadline_ms / 1000 - time.time()) if info.deadline_ms else None

        try:
            failure = self._saves.settle(patience_s())
            if failure is not None:
                _logger.error("the save before that of step %d failed: %s", step, failure)
            begun = self.save(step, state, metrics=metrics, rng=rng, **parts) or begun
            self.wait_durable(patience_s())
        except SaveFailed as error:  # an error of the program would not count as a preemption
            _logger.error("the save before the preemption is not durable: %s", error)
        return begun

    def wait_durable(self, timeout_s: float | None = None) -> int | None:
        durable_step = super().wait_durable(timeout_s)
        self._report()
        return durable_step

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.wait_durable()
        except SaveFailed:
            if self._on_failure == "raise":
                raise
        finally:
            super().__exit__(kind, error, traceback)

    def _save(
        self, step: int, reason: str, metrics: Mapping[str, float] | None, state: Callable[[], dict[str, Any]]
    ) -> bool:
        path = f"{self._folder}/{self._saves.history.path(step)}"
        begun = super()._save(step, reason, metrics, state)
        if begun:
            with contextlib.suppress(CheckpointError, OSError):  # the save fails, too, or `_report`
                self._mark(path)
            self._report()  # the save before this one: it was waited for
            self._pending = step, path, {name: float(value) for name, value in (metrics or {}).items()}
            if self._is_off:
                self.wait_durable()
        return begun

    def _mark(self, path: str) -> None:
        """Leave a mark beside a checkpoint, before a later one can be durable, and `keep` removes this one."""
        if self._ranks.rank == 0:
            history = self._saves.history
            with contextlib.closing(
                open_store(history.url(last_segment(path)), history.storage_options)
            ) as store:
                put_bytes(store, _MARK, b"")

    def _report(self) -> None:
        """Report the pending checkpoint, on all workers, unless its save failed."""
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] in self._saves.steps:
            step, path, metrics = pending
            self._mark(path)
            ray.train.report(
                {"step": step, **metrics},
                checkpoint=ray.train.Checkpoint(path, self._storage.storage_filesystem),
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            )


def url_of(checkpoint: Any) -> str:
    """Return where `ckpt.load` finds a checkpoint of Ray, such as `Result.checkpoint`: a path or URL."""
    return _url(checkpoint.filesystem, checkpoint.path)


def _storage() -> Any:
    if not hasattr(ray.train, "CheckpointUploadMode"):
        raise ConfigurationError("this adapter needs Ray Train V2: unset RAY_TRAIN_V2_ENABLED=0")
    try:
        context = get_train_context()
    except RuntimeError:
        raise ConfigurationError(
            "make this manager in the function that Ray Train runs on its workers (with num_workers of at "
            "least 1); elsewhere use ckpt.CheckpointManager"
        ) from None
    if context.train_run_context.run_config.checkpoint_config.num_to_keep is not None:
        raise ConfigurationError(
            "CheckpointConfig(num_to_keep=...) of Ray deletes the folders of checkpoints, and so would this "
            "manager: leave it out, and pass keep=... to the manager"
        )
    return context.get_storage()


def _check_endpoint(filesystem: Any, url: str, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse to save into a bucket of one server while Ray looks for it on another."""
    rays = _endpoint(filesystem)
    if not url.startswith("s3://") or rays is None:
        return
    with contextlib.closing(open_store(url, storage_options)) as store:
        requests = store.raw_requests()
        assert requests is not None  # a store of S3
        ours = requests.bucket_url.rpartition("/")[0]
    if _server(rays) != _server(ours):
        raise ConfigurationError(
            f"Ray's file system is on {rays or 'AWS'}, this manager would save on {ours}: set AWS_ENDPOINT_URL on the "
            "workers and the driver, or pass storage_options={'endpoint_url': ...} with Ray's endpoint",
            url=url,
        )


def _endpoint(filesystem: Any) -> str | None:
    """Return the endpoint of an S3 file system, empty for AWS itself; None if it does not name one."""
    if filesystem.type_name == "s3":
        options = filesystem.__reduce__()[1][0]  # pyarrow has no property for it
        endpoint = str(options["endpoint_override"])
        return endpoint if not endpoint or "://" in endpoint else f"{options['scheme']}://{endpoint}"
    fs = getattr(getattr(filesystem, "handler", None), "fs", None)
    return getattr(fs, "endpoint_url", None) or (getattr(fs, "client_kwargs", None) or {}).get("endpoint_url")


def _server(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if not host or ".amazonaws." in host:
        return "AWS", 0  # by region, or by way of a private network
    return host, parts.port or (80 if parts.scheme == "http" else 443)


def _url(filesystem: Any, path: str) -> str:
    kind = filesystem.type_name.partition("::")[0]
    if kind == "py" and hasattr(filesystem, "handler") and hasattr(filesystem.handler, "fs"):
        protocol = filesystem.handler.fs.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        return path if scheme in ("file", "local") else f"{scheme}://{path}"
    if kind == "local":
        return path
    if kind not in _SCHEMES:
        raise ConfigurationError(
            f"Ray's file system {filesystem.type_name!r} has no URL here: use s3:// or a folder"
        )
    return f"{_SCHEMES[kind]}://{path}"
