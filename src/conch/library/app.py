"""A complete server (front ends, models and metrics) and the process of ``conch serve``.

Only this module combines front ends, server and telemetry. The ports are open from the start: the server is live at
once, and ready when its models are. ``run`` and ``serve`` belong to the process and set up signals and logs; the
library creates an ``Application`` without them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from conch import __version__
from conch.backends.table import BACKENDS
from conch.core.errors import Code, ConchError, internal, invalid
from conch.frontends.api_keys import ApiKeys
from conch.frontends.grpc.server import GrpcFrontend
from conch.frontends.http.console.routes import Console
from conch.frontends.http.platforms import (
    OciDataScience,
    Platform,
    PlatformRouter,
    SageMaker,
    SageMakerModels,
    VertexAi,
    check_ports,
    only_model,
)
from conch.frontends.http.routes import HttpEndpoint, Router
from conch.frontends.http.server import HttpListener, MetricsPage
from conch.frontends.limits import ClientLimits
from conch.frontends.listening import PortTakenError, exposure_warnings, is_local, make_context
from conch.frontends.offloading.offloader import Offloader
from conch.machine import logs
from conch.machine.ports import holder, host_and_port
from conch.machine.temporary import remove_orphans
from conch.options.settings import SERVER_VERSION, Settings, by_scope
from conch.repository.backends import BackendDirectories
from conch.repository.errors import NotFoundError
from conch.repository.roots import parse_location
from conch.repository.scan import ModelRepository
from conch.server.core import EXTENSIONS, InferenceServer
from conch.server.heap import heap_trimmer, use_one_heap
from conch.telemetry.metrics import MetricsConfig, Registry
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import values_of
from conch.workers.host.spawn import raise_limit

LOG = logging.getLogger("conch")

#: Called with the server and the addresses of its front ends.
OnReady = Callable[[InferenceServer, Mapping[str, tuple[str, int]]], None]

#: Returns lines of help for an error that prevents the server from starting.
Explain = Callable[[ConchError], Sequence[str]]

#: Timeout for sending the last responses after the server has stopped (s).
FLUSH_SECONDS = 2.0


class LoadFailed(ConchError):
    """Failure to load the required models ``names``; INTERNAL as in Triton."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        failures = "; ".join(f"'{name}': {reason}" for name, reason in reasons.items())
        super().__init__(f"failed to load all models ({failures})", Code.INTERNAL)
        self.names = tuple(reasons)


def run(settings: Settings, on_ready: OnReady | None = None, explain: Explain | None = None) -> int:
    """Call ``serve``; print the error if the server cannot start. Returns the exit status."""
    try:
        return serve(settings, on_ready)
    except ConchError as error:
        lines = explain(error) if explain is not None else ()
        print(f"error: creating server: {error.code.value} - {error.message}", *lines, sep="\n", file=sys.stderr)
        return 1


def serve(settings: Settings, on_ready: OnReady | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status. Call in the main thread.

    ``on_ready`` is called after all startup models are loaded. Raises ConchError if the server cannot start.
    """
    raise_limit()
    use_one_heap()
    log = logs.setup(settings.log_settings)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(settings, on_ready))
    finally:
        logs.reset(log)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory of a server: uvloop's, or None (Python's own loop) if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:  # not on this platform
        return None
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return new_event_loop


async def _serve(settings: Settings, on_ready: OnReady | None = None) -> int:
    LOG.info("conch %s (serves as Triton %s) under Python %s", __version__, SERVER_VERSION, platform.python_version())
    application = Application(settings)
    stop = _stop_on_signals()
    try:
        await application.listen()
        loading = asyncio.ensure_future(application.load_models())
        await asyncio.wait([loading, asyncio.ensure_future(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            failed = loading.result()
            if on_ready is not None and not failed:
                on_ready(application.server, application.addresses)
            await stop.wait()
        else:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
    except BaseException:
        await application.stop(0)
        raise
    in_time = await application.stop(application.exit_seconds)
    LOG.info("The server has stopped.")
    return 0 if in_time else 1


def _warn_of_missing_features(settings: Settings) -> None:
    """Log a warning for each option that is accepted but has no effect."""
    for flag, reason in settings.without_effect.items():
        LOG.warning("--%s has no effect: %s", flag, reason)


async def _remove_orphans() -> None:
    """Remove models and environments that killed servers left in the temporary directory."""
    try:
        for folder in await asyncio.to_thread(remove_orphans):
            LOG.info("removed %s, left by a process that was killed", folder)
    except OSError as error:
        LOG.warning("the temporary files of killed servers are not removed: %s", error)


def _stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set; further signals have no effect."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _signalled, number, stop)
    return stop


def _signalled(number: int, stop: asyncio.Event) -> None:
    if not stop.is_set():
        LOG.info("Signal (%d) received.", number)
        stop.set()


def _reason(error: ConchError, repository: ModelRepository) -> str:
    """Return the message of a failed load without its trailing newline and semicolon, for use within a sentence."""
    if isinstance(error, NotFoundError):
        return repository.no_such_model(error.name)
    return error.message.rstrip().removesuffix(";").rstrip()


class Application:
    """The server and the front ends that ``settings`` enable, each on its own port.

    Belongs to one event loop. Call ``listen``, ``load_models`` and ``stop`` once each and in this order; ``stop`` is
    required even after an error. ``addresses`` maps each listening front end to its host and port: ``grpc``, ``http``,
    ``openai``, ``sagemaker``, ``vertex-ai``, ``oci``, ``metrics``. Raises INVALID_ARG without a model repository.
    """

    def __init__(self, settings: Settings) -> None:
        _warn_of_missing_features(settings)
        for line in exposure_warnings(settings):
            LOG.warning("%s", line)
        if not settings.model_repository:
            raise invalid("--model-repository must be specified, or one MODEL: conch serve MODEL")
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.addresses: dict[str, tuple[str, int]] = {}
        has_console = settings.console if settings.console is not None else is_local(settings.http_address)
        has_console &= settings.allow_http
        registry = Registry(
            MetricsConfig.parse(by_scope(settings.metrics_config).get("", {})),
            latencies=has_console,
            cpu=settings.allow_cpu_metrics,
            gpu=settings.allow_gpu_metrics,
            cache=bool(settings.cache_config),
            interval_ms=settings.metrics_interval_ms,
        )
        locations = [parse_location(path) for path in settings.model_repository]
        backends = BackendDirectories.beginning_with(settings.backend_directory)
        if backends.first is not None and not backends.first.is_dir():
            LOG.warning("--backend-directory: %s is not a directory", backends.first)
        repository = ModelRepository(
            locations,
            settings.model_config_name or None,
            backends,
            namespacing=settings.model_namespacing,
            cache=settings.repository_cache_directory,
        )
        if settings.debug and not repository.keys(settings.debug):
            raise invalid(f"--debug names a model that is missing: {repository.no_such_model(settings.debug)}")
        self._tracing = Tracing(values_of(settings.trace_config, os.environ))
        self.server = InferenceServer(settings, repository, registry, self._tracing)
        limits = ClientLimits.of(settings)
        registry.add(limits.budget.families)
        registry.add(limits.counts.families)
        self._offloader = Offloader(settings.offload_memory, settings.offload_timeout_secs, limits.budget)
        keys = ApiKeys.read(settings.api_key_file, os.environ)
        self._console = Console(self.server, limits.lister, keys) if has_console else None
        self._front_ends = self._make_front_ends(registry, limits, keys)
        self._services: list[str] = []
        self._heap = heap_trimmer()

    def _make_front_ends(
        self, registry: Registry, limits: ClientLimits, keys: ApiKeys
    ) -> dict[str, HttpListener | GrpcFrontend]:
        """Return the enabled front ends, by name, in the order in which they start."""
        settings, server, offloader = self._settings, self.server, self._offloader
        listeners = settings.listeners
        if listeners["sagemaker"].allowed:
            check_ports(settings)
        tls = make_context(settings, "http")
        router = partial(Router, server, offloader, limits.lister)
        http = router(keys=keys, further=self._console.endpoints if self._console is not None else ())

        def platform_listener(adapter: Platform, further: Iterable[HttpEndpoint] = ()) -> HttpListener:
            models = router(further=further, address=settings.platform_address)
            return HttpListener(PlatformRouter(models, adapter), limits)

        makers: dict[str, Callable[[], HttpListener | GrpcFrontend]] = {
            "grpc": lambda: GrpcFrontend(server, settings, limits, offloader, keys),
            "http": lambda: HttpListener(http, limits, reuse_port=settings.reuse_http_port, ssl=tls),
            "openai": lambda: HttpListener(router(openai_only=True, keys=keys), limits, ssl=tls),
            "sagemaker": lambda: platform_listener(
                SageMaker(os.environ, server.repository.registered), SageMakerModels(server).endpoints
            ),
            "vertex-ai": lambda: platform_listener(
                VertexAi(os.environ, lambda: only_model(server, settings.vertex_ai_default_model))
            ),
            "oci": lambda: platform_listener(
                OciDataScience(os.environ, lambda: only_model(server, settings.oci_default_model, "oci-default-model"))
            ),
            "metrics": lambda: HttpListener(MetricsPage(registry, limits.lister), limits),
        }
        return {name: make() for name, make in makers.items() if listeners[name].allowed}

    async def listen(self) -> None:
        """Bind the ports. Raises INTERNAL with each port that is taken, its holder and its flag.

        The ports are open at once, but only health checks can be used until models are loaded. Therefore
        :meth:`load_models` logs Triton's "Started" lines, which scripts use to detect that the server is ready.
        """
        taken: list[str] = []
        for name, front_end in self._front_ends.items():
            listener = self._settings.listeners[name]
            try:
                host, port = self.addresses[name] = await front_end.start(listener.address, listener.port)
            except PortTakenError as error:
                taken.append(f"{error.message}by {holder(error.port)}: choose another port with --{name}-port")
            else:
                self._services.append(f"{listener.service} at {host}:{port}")
        if taken:
            raise internal("; ".join(taken))
        if self._console is not None:
            self._console.start()
            scheme = "https" if self._settings.listeners["http"].encrypted else "http"
            self._services.append(f"Console at {scheme}://{host_and_port(*self.addresses['http'])}/console/")
        if self._services:
            LOG.info("Listening; not ready until the models are loaded: %s", ", ".join(self._services))

    async def load_models(self) -> dict[str, ConchError]:
        """Load the startup models; returns the errors of failed loads by model name.

        Raises :class:`LoadFailed` for failed loads if the option ``exit_on_error`` is set.
        """
        self._tidying = asyncio.ensure_future(_remove_orphans())
        await asyncio.to_thread(self.server.repository.open)
        failed = await self.server.load_startup_models()
        self._log_tables()
        if failed and self._settings.exit_on_error:
            raise LoadFailed({name: _reason(error, self.server.repository) for name, error in failed.items()})
        for service in self._services:
            LOG.info("Started %s", service)
        return failed

    @property
    def exit_seconds(self) -> float:
        """The timeout for in-flight requests at shutdown (s); 0 with ``--debug``: a request may be at a breakpoint."""
        return 0 if self._settings.debug else self._settings.exit_timeout_secs

    async def stop(self, seconds: float) -> bool:
        """Refuse connections, finish requests, unload models and close; False if that takes longer than ``seconds``."""
        if self._console is not None:
            await self._console.close()
        self.server.repository.close()
        for front_end in self._front_ends.values():
            if isinstance(front_end, HttpListener):  # gRPC clients still get responses: UNAVAILABLE
                front_end.refuse_new()
        in_time = await self.server.stop(seconds)
        if not in_time:
            LOG.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
        await asyncio.gather(*(front_end.stop(FLUSH_SECONDS) for front_end in self._front_ends.values()))
        await self._offloader.close()
        await asyncio.to_thread(self._tracing.close)
        if self._heap is not None:
            self._heap.close()
        return in_time

    def abandon(self) -> None:
        """Stop in the background. Can be called from any thread, for example by the garbage collector."""
        if not self._loop.is_closed():  # if the loop is closed, workers end when their channels are collected
            self._loop.call_soon_threadsafe(self._begin_abandoned_stop)

    def _begin_abandoned_stop(self) -> None:
        self._abandoned = self._loop.create_task(self.stop(0))

    def _log_tables(self) -> None:
        """Log the tables that Triton logs at startup."""
        settings = self._settings
        own = {name: backend.implementation for name, backend in BACKENDS.items()}
        logs.table("", ["Repository Agent", "Path"], [])
        logs.table(
            "",
            ["Backend", "Path", "Config"],
            [[name, code, "{}"] for name, code in sorted({**own, **self.server.repository.backends.found()}.items())],
        )
        logs.table("", ["Model", "Version", "Status"], self.server.model_rows())
        rows: list[tuple[str, object]] = [
            ("server_id", settings.id),
            ("server_version", SERVER_VERSION),
            ("conch_version", __version__),
            ("server_extensions", " ".join(EXTENSIONS)),
        ]
        rows += [(f"model_repository_path[{i}]", path) for i, path in enumerate(settings.model_repository)]
        rows.append(("model_control_mode", f"MODE_{settings.model_control_mode.upper()}"))
        rows += [(f"startup_models_{i}", name) for i, name in enumerate(settings.load_model)]
        rows += [
            ("strict_model_config", int(settings.disable_auto_complete_config)),
            ("model_config_name", settings.model_config_name),
            ("rate_limit", "OFF" if settings.rate_limit == "off" else "EXEC_COUNT"),
            ("strict_readiness", int(settings.strict_readiness)),
            ("exit_timeout", settings.exit_timeout_secs),
            ("cache_enabled", int(bool(settings.cache_config))),
        ]
        logs.table("", ["Option", "Value"], rows)
