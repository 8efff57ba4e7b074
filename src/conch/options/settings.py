"""The options of the server: their declarations, and ``parse``, which reads their texts.

``Settings`` holds the options of a server; it is validated on creation, so that contradictory settings cannot exist.
The command line and the library call ``parse``. Errors have tritonserver's wording, preceded by the option's name.
"""
# ruff: noqa: RUF009 (``option`` returns a field of a dataclass)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Annotated, Any, Final, Literal, NamedTuple

from conch.core.errors import invalid
from conch.machine.logs import LogSettings
from conch.options import declaration, triton_values
from conch.options.declaration import DirectoryName, FileName, Option, Range, Reader, Values
from conch.options.triton_values import Resource, Restriction, Setting

#: The version of Triton that the server is compatible with, as reported in the server's metadata.
SERVER_VERSION: Final = "2.51.0"


class Listener(NamedTuple):
    """A port of the server; ``title`` names its requests in messages, ``service`` its front end in the log.

    ``encrypted`` is whether it uses TLS.
    """

    title: str
    service: str
    allowed: bool
    address: str
    port: int
    encrypted: bool = False


Number = Annotated[int, Range(0, 2**63 - 1)]
Count = Annotated[int, Range(1, 2**31 - 1)]
Bytes = Annotated[int, Range(1, 2**63 - 1)]
Port = Annotated[int, Range(0, 65535)]
ControlMode = Literal["none", "poll", "explicit", "on-demand"]
LoadOverrides = Literal["files", "config", "none"]
RateLimit = Literal["off", "execution_count"]
LogFormat = Literal["default", "ISO8601", "json"]
Compression = Literal["none", "low", "medium", "high"]

#: Reasons for options that are checked but have no effect.
_TRITONS: Final = "it applies only to tritonserver"


#: Declares an option whose value, even a Boolean, follows the flag, as tritonserver's do.
option = partial(declaration.option, switch=False)


def _ignored(default: Any = "", read: Reader | None = None) -> Any:
    help = "No effect; for command lines of tritonserver."
    return option(default, "Accepted, without effect", help, read=read, no_effect=_TRITONS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's options, with defaults for those not given. Raises INVALID_ARG for contradictory options."""

    # fmt: off
    model_repository: tuple[DirectoryName, ...] = option(
        (), "Models", "Directory of models, or s3://, gs://, as:// or hf:// URL of one; repeatable.", common=True
    )
    repository_cache_directory: DirectoryName = option(
        "", "Models", "Directory for copies of models from object stores; that of the user's cache by default."
    )
    model_control_mode: ControlMode = option(
        "none", "Models", "Load all models (none), changed models (poll), on request (explicit), or when used "
        "(on-demand).",
        common=True,
    )
    load_model: tuple[Annotated[str, Values("models_to_load")], ...] = option(
        (), "Models", "Model to load at startup, * for all; repeatable.", common=True
    )
    model_load_overrides: LoadOverrides = option(
        "files", "Models", "What clients may send with a load: files (which are executed), a configuration, "
        "or only the name."
    )
    repository_poll_secs: Count = option(15, "Models", "Seconds between polls of the repository in poll mode.")
    model_config_name: Annotated[str, Values("configurations")] = option(
        "", "Models", "Use configs/<name>.pbtxt for models that have this file.", read=triton_values.not_empty
    )
    disable_auto_complete_config: bool = option(
        False, "Models", "Use configurations as written; do not complete them.", switch=True
    )
    model_load_thread_count: Count = option(4, "Models", "Number of models that load at the same time.")
    model_load_retry_count: Number = option(0, "Models", "Number of retries of a failed load.")
    check_memory_on_load: bool = option(
        True, "Models", "Refuse to load models whose weights are larger than the available memory."
    )
    model_namespacing: bool = option(False, "Models", "Allow models with the same name in several repositories.")
    max_warmup_bytes: Count = option(128 << 20, "Models", "Maximum size of a warm-up sample, in bytes.")
    debug: str = option("", "Models", "Model whose only instance is connected to the terminal, so that "
                                      "breakpoint() works.")
    backend_directory: DirectoryName = option(
        "", "Models", "Directory of Python-based backends, searched before the server's own."
    )
    backend_config: tuple[Setting, ...] = option(
        (), "Models", "Setting of a backend, or of all: [<backend>,]<setting>=<value>; repeatable.",
        read=triton_values.setting("backend name"),
    )
    cache_config: tuple[Setting, ...] = option(
        (), "Models", "Setting of the cache local or redis, such as local,size=1000000; repeatable.",
        read=triton_values.setting("cache name", scope_needed=True),
    )
    rate_limit: RateLimit = option(
        "off", "Models", "Choose the next instance by resources and priorities (execution_count), or not at all (off)."
    )
    rate_limit_resource: tuple[Resource, ...] = option(
        (), "Models", "Resource that instances share: <name>:<count>[:<device>]; repeatable.",
        read=triton_values.resource,
    )

    max_loaded_models: Number = option(0, "Load on demand", "Maximum number of loaded models; 0 for no limit.")
    memory_budget: str = option(
        "80%", "Load on demand", "Memory for models: bytes, with a unit (8GiB), or a share of the machine's (50%).",
        read=triton_values.size,
    )
    min_loaded_secs: Number = option(
        10, "Load on demand", "Minimum seconds before a model in use is evicted; at least the duration of its load."
    )
    load_wait_secs: Count = option(60, "Load on demand", "Seconds that a request waits for its model to load.")
    max_load_waiting: Count = option(
        10_000, "Load on demand", "Maximum number of requests that wait for models to load."
    )
    max_load_waiting_per_model: Count = option(1_000, "Load on demand", "Maximum number of requests that wait "
                                                                        "for one model to load.")

    id: str = option("triton", "Server", "Name of this server in its metadata.")
    exit_timeout_secs: Number = option(
        30, "Server", "Seconds for requests to complete when the server stops.", common=True
    )
    exit_on_error: bool = option(True, "Server", "Exit when a model fails to load at startup.", common=True)
    strict_readiness: bool = option(True, "Server", "Report readiness only while all models are ready.")
    allow_client_shm: bool = option(False, "Server", "Let clients register shared memory regions.")
    # 10,000 small requests use about 50 MB, and wait a second at 10,000 requests per second; at 100 per second, the
    # last would wait longer than clients do.
    max_pending_requests: Count = option(
        10_000, "Server", "Maximum number of waiting requests of a model without its own limit."
    )
    max_bytes_in_flight: Number = option(
        0, "Server", "Maximum bytes of requests and unread responses in memory; 0 for a quarter of the memory."
    )
    # Parsed JSON uses up to 24 times its size; JSON of floats a tenth of that.
    offload_memory: Bytes = option(2 << 30, "Server", "Maximum memory for decoding one large request, in bytes.")
    offload_timeout_secs: Count = option(
        60, "Server", "Maximum processor time for decoding one large request, in seconds."
    )
    max_connections: Number = option(
        0, "Server", "Maximum connections of all protocols; 0 for as many as the limit of open files allows."
    )
    head_timeout_secs: Number = option(
        30, "Server", "Timeout in seconds for receiving the head of a request; 0 for no limit."
    )
    body_timeout_secs: Number = option(
        60, "Server", "Timeout in seconds for receiving a body, plus one second per 16 KiB; 0 for no limit."
    )
    unread_timeout_secs: Number = option(
        60, "Server", "Timeout in seconds for a client to read a response, plus one second per 16 KiB; 0 "
                      "for no limit."
    )
    idle_timeout_secs: Number = option(
        600, "Server", "Timeout in seconds for an idle connection; 0 for no limit."
    )

    stopped_worker_secs: Number = option(
        1, "Workers", "Seconds before a worker stopped by a signal is replaced; 0 for never."
    )
    silent_worker_secs: Number = option(
        60, "Workers", "Seconds without a heartbeat or processor time before a worker is replaced; 0 for never."
    )
    execute_timeout_secs: Number = option(
        3600, "Workers", "Timeout in seconds for one execution; then its worker is replaced; 0 for no limit."
    )
    step_timeout_secs: Number = option(
        300, "Workers", "Timeout in seconds for one step of a language model's engine; 0 for no limit."
    )
    load_idle_secs: Number = option(
        600, "Workers", "Timeout in seconds for a load that neither computes nor reads anything; 0 for no limit."
    )
    load_timeout_secs: Number = option(0, "Workers", "Timeout in seconds for a load as a whole; 0 for no limit.")
    unload_timeout_secs: Number = option(
        300, "Workers", "Timeout in seconds for the last requests of an unloaded or replaced model; 0 for no limit."
    )
    finalize_timeout_secs: Number = option(
        10, "Workers", "Timeout in seconds for a worker to finalize its model and exit."
    )
    worker_template_secs: Number = option(
        60, "Workers", "Seconds to keep a worker template with fewer than two workers; 0 disables templates."
    )

    allow_http: bool = option(True, "HTTP", "Serve HTTP.")
    http_address: str = option("127.0.0.1", "HTTP", "Address to listen on, 0.0.0.0 for all.", common=True)
    http_port: Port = option(8000, "HTTP", "Port to listen on; 0 selects a free port.", common=True)
    reuse_http_port: bool = option(False, "HTTP", "Share the port with other servers that set this too.")
    http_header_forward_pattern: str = option(
        "", "HTTP", "Regular expression for the headers to forward as parameters.", read=triton_values.pattern
    )
    http_restricted_api: tuple[Restriction, ...] = option(
        (), "HTTP", "APIs that require a header: <api>,...:<header>=<value>; repeatable.",
        read=triton_values.restriction("api"),
    )
    api_key_file: FileName = option(
        "", "HTTP", "File of API keys, <name>=<key> per line; clients of HTTP, OpenAI and gRPC must send one of them; "
        "CONCH_API_KEY is another key."
    )
    http_use_ssl: bool = option(False, "HTTP", "Use TLS with the server's certificate and key.")
    http_use_ssl_mutual: bool = option(False, "HTTP", "Require client certificates.")
    http_server_cert: FileName = option("", "HTTP", "PEM file of the server's certificate.")
    http_server_key: FileName = option("", "HTTP", "PEM file of the server's key.")
    http_root_cert: FileName = option("", "HTTP", "PEM file of the root certificate for verifying clients.")
    http_allowed_host: tuple[str, ...] = option(
        (), "HTTP", "Host that requests may name and that web pages may come from, * for any; repeatable."
    )
    cors_origins: tuple[str, ...] = option(
        (), "HTTP", "Origin of web pages that may send requests and read responses, such as https://chat.example.com; "
        "* for any; repeatable.",
        read=triton_values.origin,
    )
    console: bool | None = option(
        None, "HTTP", "Serve the console at /console of the HTTP port; by default only if that listens on loopback.",
        flags=("--console/--no-console",), switch=True,
    )
    http_max_input_size: Count = option(64 << 20, "HTTP", "Largest JSON body or decompressed body, in bytes.")

    response_store_bytes: Number = option(
        64 << 20, "HTTP", "Memory for stored responses of /v1/responses, in bytes; 0 stores none."
    )
    response_store_secs: Count = option(3600, "HTTP", "Seconds for which responses of /v1/responses are stored.")

    allowed_media_domains: tuple[str, ...] = option(
        (), "HTTP", "Host, or <host>:<port>, from which images in chats may be fetched over http and https; repeatable."
    )
    default_temperature: Annotated[float, Range(0, 2)] = option(
        1.0, "HTTP", "Temperature of the OpenAI and Anthropic APIs if neither the request nor the checkpoint sets one."
    )
    openai_port: Annotated[int, Range(-1, 65535)] = option(
        -1, "HTTP", "Additional port for only the OpenAI API; 0 selects a free port, -1 disables it."
    )

    allow_grpc: bool = option(True, "gRPC", "Serve gRPC.")
    grpc_address: str = option("127.0.0.1", "gRPC", "Address to listen on.", common=True)
    grpc_port: Port = option(8001, "gRPC", "Port to listen on; 0 selects a free port.", common=True)
    reuse_grpc_port: bool = option(False, "gRPC", "Share the port with other servers that set this too.")
    grpc_header_forward_pattern: str = option(
        "", "gRPC", "Regular expression for the metadata to forward as parameters.", read=triton_values.pattern
    )
    grpc_restricted_protocol: tuple[Restriction, ...] = option(
        (), "gRPC", "APIs that require metadata: <protocol>,...:<key>=<value>; repeatable.",
        read=triton_values.restriction("protocol"),
    )
    grpc_use_ssl: bool = option(False, "gRPC", "Use TLS with the server's certificate and key.")
    grpc_use_ssl_mutual: bool = option(False, "gRPC", "Require client certificates.")
    grpc_server_cert: FileName = option("", "gRPC", "PEM file of the server's certificate.")
    grpc_server_key: FileName = option("", "gRPC", "PEM file of the server's key.")
    grpc_root_cert: FileName = option("", "gRPC", "PEM file of the root certificate for verifying clients.")
    grpc_infer_response_compression_level: Compression = option("none", "gRPC", "Compression of inference responses.")
    grpc_max_decompressed_size: Count = option(64 << 20, "gRPC", "Largest message after decompression, in bytes.")
    grpc_keepalive_time: Number = option(7_200_000, "gRPC", "Milliseconds of silence before a keepalive ping.")
    grpc_keepalive_timeout: Number = option(20_000, "gRPC", "Milliseconds to wait for the response to a ping.")
    grpc_keepalive_permit_without_calls: bool = option(False, "gRPC", "Ping even when no call is open.")
    grpc_http2_max_pings_without_data: Number = option(
        2, "gRPC", "Maximum number of pings sent without data in between; 0 for no limit."
    )
    grpc_http2_min_recv_ping_interval_without_data: Number = option(
        300_000, "gRPC", "Minimum milliseconds between pings of a client that sends no data."
    )
    grpc_http2_max_ping_strikes: Number = option(
        2, "gRPC", "Number of early pings that are tolerated; 0 for no limit."
    )
    grpc_max_connection_age: Number = option(0, "gRPC", "Maximum age of a connection in milliseconds; 0 for no limit.")
    grpc_max_connection_age_grace: Number = option(
        0, "gRPC", "Milliseconds for calls on such a connection to complete; 0 for no limit."
    )

    platform_address: str = option(
        "0.0.0.0", "Platforms", "Address for the platforms' ports to listen on; all addresses by default."
    )
    allow_sagemaker: bool = option(False, "Platforms", "Serve Amazon SageMaker.")
    sagemaker_port: Port = option(8080, "Platforms", "Port for SageMaker; 0 selects a free port.")
    sagemaker_safe_port_range: tuple[tuple[int, int], ...] = option(
        (), "Platforms", "<low>-<high>: permitted range for the ports of all other front ends.",
        read=triton_values.pair("-"),
    )
    allow_vertex_ai: bool = option(False, "Platforms", "Serve Google Vertex AI.")
    vertex_ai_port: Port = option(8080, "Platforms", "Port for Vertex AI; 0 selects a free port.")
    vertex_ai_default_model: str = option("", "Platforms", "Model for Vertex AI's requests; by default the only model.")
    allow_oci: bool = option(False, "Platforms", "Serve OCI Data Science.")
    oci_port: Port = option(8080, "Platforms", "Port for OCI Data Science; 0 selects a free port.")
    oci_default_model: str = option("", "Platforms", "Model for OCI's /predict; by default the only model.")

    allow_metrics: bool = option(True, "Metrics", "Serve metrics.")
    metrics_address: str = option("", "Metrics", "Address to listen on; that of HTTP by default.")
    metrics_port: Port = option(8002, "Metrics", "Port to listen on; 0 selects a free port.", common=True)
    metrics_interval_ms: Annotated[float, Range(0)] = option(
        2000.0, "Metrics", "Milliseconds between measurements of the CPU and the GPUs."
    )
    metrics_config: tuple[Setting, ...] = option(
        (), "Metrics",
        "counter_latencies, summary_latencies or histogram_latencies=<bool>, summary_quantiles=<values>; repeatable.",
        read=triton_values.metrics_setting,
    )
    allow_gpu_metrics: bool = option(True, "Metrics", "Report GPU metrics.")
    allow_cpu_metrics: bool = option(True, "Metrics", "Report CPU metrics.")

    log_verbose: Number = option(0, "Logging", "Verbose level; 0 for none.", common=True)
    log_info: bool = option(True, "Logging", "Log information.")
    log_warning: bool = option(True, "Logging", "Log warnings.")
    log_error: bool = option(True, "Logging", "Log errors.")
    log_access: bool = option(False, "Logging", "Log every call: status, sizes, duration, API key, request and trace.")
    log_format: LogFormat = option("default", "Logging", "Format of the start of each line; json: a line per event.")
    log_file: FileName = option("", "Logging", "File to append to, instead of standard error.")
    trace_config: tuple[Setting, ...] = option(
        (), "Logging",
        "Setting of traces: [triton|opentelemetry,]<setting>=<value>, such as level=TIMESTAMPS; repeatable.",
        read=triton_values.trace_setting,
    )

    http_thread_count: Count = _ignored(8)
    grpc_infer_thread_count: Annotated[int, Range(2, 128)] = _ignored(2)
    grpc_infer_allocation_pool_size: Number = _ignored(8)
    grpc_max_response_pool_size: Number = _ignored(2**31 - 1)
    pinned_memory_pool_byte_size: Number = _ignored(256 << 20)
    cuda_memory_pool_byte_size: tuple[tuple[int, int], ...] = _ignored((), triton_values.pair(":"))
    cuda_virtual_address_size: tuple[tuple[int, int], ...] = _ignored((), triton_values.pair(":"))
    min_supported_compute_capability: float = _ignored(6.0)
    buffer_manager_thread_count: Number = _ignored(0)
    host_policy: tuple[Setting, ...] = _ignored((), triton_values.setting("policy name"))
    model_load_gpu_limit: tuple[tuple[int, float], ...] = _ignored((), triton_values.pair(":", triton_values.number))
    enable_peer_access: bool = _ignored(True)
    repoagent_directory: str = _ignored()
    cache_directory: str = _ignored()
    sagemaker_thread_count: Count = _ignored(8)
    vertex_ai_thread_count: Count = _ignored(8)
    # fmt: on

    def __post_init__(self) -> None:
        fill = object.__setattr__  # the dataclass is frozen for all other code
        fill(self, "metrics_address", self.metrics_address or self.http_address)
        fill(self, "model_repository", tuple(dict.fromkeys(self.model_repository)))
        self._check_models()
        self._check_ports()
        _check_restrictions("api", self.http_restricted_api)
        _check_restrictions("protocol", self.grpc_restricted_protocol)

    def _check_models(self) -> None:
        if self.load_model and self.model_control_mode not in ("explicit", "on-demand"):
            raise invalid("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
        if "*" in self.load_model and len(self.load_model) > 1:
            raise invalid("Wildcard model name '*' must be the ONLY startup model if specified at all.")
        if self.model_namespacing and self.model_control_mode == "on-demand":
            raise invalid("--model-namespacing cannot be combined with --model-control-mode=on-demand")
        if self.model_control_mode != "on-demand":
            for flag in ("max-loaded-models", "memory-budget"):
                declared = OPTIONS[flag]
                if getattr(self, declared.name) != declared.default:
                    raise invalid(f"--{flag} requires --model-control-mode=on-demand")
            return
        if "*" in self.load_model:
            raise invalid("--load-model=* would keep all models loaded: with --model-control-mode=on-demand, name some")
        if 0 < self.max_loaded_models < len(self.load_model):
            raise invalid(
                f"--load-model keeps {len(self.load_model)} models loaded, more than "
                f"--max-loaded-models={self.max_loaded_models}"
            )

    def _check_ports(self) -> None:
        used = [listener for listener in self.listeners.values() if listener.allowed and listener.port]
        for first, second in combinations(used, 2):
            if (first.address, first.port) == (second.address, second.port):
                raise invalid(
                    f"The server cannot listen to {first.title} requests and {second.title} requests"
                    f" at the same address and port {first.address}:{first.port}"
                )

    @property
    def listeners(self) -> Mapping[str, Listener]:
        """The port of every front end, by name; ``--<name>-port`` sets it."""
        http, platform = self.http_address, self.platform_address
        https, grpcs = self.http_use_ssl or self.http_use_ssl_mutual, self.grpc_use_ssl or self.grpc_use_ssl_mutual
        return {
            "http": Listener("HTTP", "HTTPService", self.allow_http, http, self.http_port, https),
            "openai": Listener("OpenAI", "OpenAI API", self.openai_port >= 0, http, self.openai_port, https),
            "grpc": Listener("GRPC", "GRPCInferenceService", self.allow_grpc, self.grpc_address, self.grpc_port, grpcs),
            "metrics": Listener(
                "metrics", "Metrics Service", self.allow_metrics, self.metrics_address, self.metrics_port
            ),
            "vertex-ai": Listener(
                "Vertex AI", "Vertex AI HTTPService", self.allow_vertex_ai, platform, self.vertex_ai_port
            ),
            "sagemaker": Listener(
                "SageMaker", "Sagemaker HTTPService", self.allow_sagemaker, platform, self.sagemaker_port
            ),
            "oci": Listener(
                "OCI Data Science", "OCI Data Science HTTPService", self.allow_oci, platform, self.oci_port
            ),
        }

    @property
    def without_effect(self) -> dict[str, str]:
        """The reasons why options that differ from their default have no effect, by flag."""
        return {
            flag: declared.no_effect
            for flag, declared in OPTIONS.items()
            if declared.no_effect and getattr(self, declared.name) != declared.default
        }

    @property
    def log_settings(self) -> LogSettings:
        return LogSettings(
            log_file=self.log_file,
            log_info=self.log_info,
            log_warning=self.log_warning,
            log_error=self.log_error,
            log_verbose_level=self.log_verbose,
            log_access=self.log_access,
            log_format=self.log_format,
        )


def _check_restrictions(kind: str, restrictions: Iterable[Restriction]) -> None:
    seen: set[str] = set()
    for api in (api for restriction in restrictions for api in restriction.apis):
        if api in seen:
            raise invalid(f"restricted {kind} '{api}' can not be specified in multiple config groups")
        seen.add(api)


def by_scope(settings: Iterable[Setting]) -> dict[str, dict[str, str]]:
    """Return the keys and values of each scope; the last value of a key counts."""
    scopes: dict[str, dict[str, str]] = {}
    for setting in settings:
        scopes.setdefault(setting.scope, {})[setting.key] = setting.value
    return scopes


#: All options by flag (without the leading dashes), in the order of the help.
OPTIONS: Final[Mapping[str, Option]] = {
    name.replace("_", "-"): replace(declared, read=declared.read or triton_values.reader_of(declared))
    for name, declared in declaration.options_of(Settings).items()
}


class OlderFlag(NamedTuple):
    """Another flag for an option: a template of the option's value, and Triton's warning if the flag is deprecated."""

    option: str
    value: str = "{}"
    warning: str = ""


_TRACE: Final = (
    "'--{}' has been deprecated and will be removed in future releases. Please use '--trace-config {} instead."
)
#: Older flags, without the leading dashes.
RENAMED: Final[Mapping[str, OlderFlag]] = {
    "model-store": OlderFlag("model-repository"),
    "strict-model-config": OlderFlag(
        "disable-auto-complete-config",
        warning="'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead.",
    ),
    "response-cache-byte-size": OlderFlag("cache-config", "local,size={}"),
    **{
        old: OlderFlag(new, warning=f"'--{old}' is deprecated: use '--{new}'.")
        for old, new in (("codec-memory", "offload-memory"), ("codec-timeout-secs", "offload-timeout-secs"))
    },
    **{
        f"trace-{name}": OlderFlag(
            "trace-config", f"{setting}={{}}", _TRACE.format(f"trace-{name}", f"{setting}=<{values}>")
        )
        for name, setting, values in (
            ("file", "triton,file", "filepath"),
            ("level", "level", "OFF|TIMESTAMPS|TENSORS"),
            ("rate", "rate", "rate value"),
            ("count", "count", "count value"),
            ("log-frequency", "triton,log-frequency", "log frequency value"),
        )
    },
}


def parse(texts: Mapping[str, Sequence[str]]) -> Settings:
    """Parse the texts given for each flag (without dashes); the last text of an option counts.

    Raises INVALID_ARG for an invalid value or contradictory options.
    """
    if "response-cache-byte-size" in texts and "cache-config" in texts:
        raise invalid(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided."
            " Please provide one or the other."
        )
    values: dict[str, list[Any]] = {}
    # Alternative flags first, so that values of the flags themselves override theirs.
    for flag in sorted(texts, key=lambda flag: flag not in RENAMED):
        target, template, _ = RENAMED.get(flag, OlderFlag(flag))
        read = OPTIONS[target].read
        assert read is not None
        values.setdefault(target, []).extend(read(flag, template.format(text)) for text in texts[flag])
    chosen: dict[str, Any] = {}
    for flag, parsed in values.items():
        option = OPTIONS[flag]
        chosen[option.name] = tuple(parsed) if option.repeatable else parsed[-1]
    return Settings(**chosen)


def platform_defaults(environment: Mapping[str, str]) -> dict[str, tuple[str]]:
    """Return the flags, with their texts, that Vertex AI sets by environment variables."""
    texts = {}
    if "AIP_HTTP_PORT" in environment:
        texts["vertex-ai-port"] = (environment["AIP_HTTP_PORT"],)
    if environment.get("AIP_MODE") == "PREDICTION":
        texts |= {"allow-vertex-ai": ("true",), "allow-http": ("false",), "allow-grpc": ("false",)}
    return texts
