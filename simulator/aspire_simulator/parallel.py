"""Run independent jobs: here, in processes of this machine, or on a Ray cluster. Results come back as they finish."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from typing import Any, Protocol

from aspire.errors import UsageError

Job = Callable[..., Any]


class Workers(Protocol):
    """Runs jobs side by side."""

    size: int

    def run(self, jobs: Iterable[tuple[Any, tuple[Any, ...]]], job: Job) -> Iterator[tuple[Any, Any]]:
        """Yield (key, ``job(*arguments)``) for each (key, arguments), as they finish. Takes jobs only when a worker is
        free, so that an endless or adaptive iterable works."""
        ...

    def close(self) -> None:
        """Release the workers."""
        ...


class Inline:
    """One job after the other in this process."""

    size = 1

    def run(self, jobs: Iterable[tuple[Any, tuple[Any, ...]]], job: Job) -> Iterator[tuple[Any, Any]]:
        for key, arguments in jobs:
            yield key, job(*arguments)

    def close(self) -> None:
        pass


class Processes:
    """Worker processes on this machine."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"number of workers {size} must be at least 1")
        self.size = size
        self._pool = ProcessPoolExecutor(size)

    def run(self, jobs: Iterable[tuple[Any, tuple[Any, ...]]], job: Job) -> Iterator[tuple[Any, Any]]:
        source, running = iter(jobs), dict[Future[Any], Any]()
        while True:
            while len(running) < self.size and (item := next(source, None)) is not None:
                running[self._pool.submit(job, *item[1])] = item[0]
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class RayWorkers:
    """Tasks on a Ray cluster at ``address`` (``local`` starts one here). Ray is imported only now."""

    def __init__(self, address: str, size: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "--ray-address needs the package ray; install it with: pip install 'aspire-llm[tune]'"
            ) from error
        self._ray = ray
        # workers must import what this process imports: the cluster shares its files, or has the package installed
        path = os.pathsep.join(entry for entry in sys.path if entry)
        options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}, "log_to_driver": False}
        if address == "local":
            options["num_cpus"] = size or os.cpu_count()
        try:
            ray.init(address=address, ignore_reinit_error=True, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"no Ray cluster answers at '{address}' ({error}); start one with: ray start --head"
            ) from error
        self.size = size or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def run(self, jobs: Iterable[tuple[Any, tuple[Any, ...]]], job: Job) -> Iterator[tuple[Any, Any]]:
        remote = self._ray.remote(job)
        source, running = iter(jobs), dict[Any, Any]()
        while True:
            while len(running) < self.size and (item := next(source, None)) is not None:
                running[remote.remote(*item[1])] = item[0]
            if not running:
                return
            done, _ = self._ray.wait(list(running), num_returns=1)
            for reference in done:
                yield running.pop(reference), self._ray.get(reference)

    def close(self) -> None:
        with suppress(Exception):
            self._ray.shutdown()


def workers(count: int = 1, ray_address: str | None = None) -> Workers:
    """Ray workers when an address is given, else ``count`` processes, or this process when that is 1."""
    if ray_address:
        return RayWorkers(ray_address, count if count > 1 else None)
    return Processes(count) if count > 1 else Inline()
