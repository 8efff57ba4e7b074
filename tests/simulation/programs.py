"""Random programs: features, models, and the steps of clients, operators and faults.

A program is plain data, so that it can be stored, and shrunk by leaving out steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.addresses import REDIS

#: The names of shared memory regions.
REGIONS = ("s0", "s1")
#: The ports of managed platforms, in addition to the HTTP port.
PLATFORMS = ("sagemaker", "vertex-ai", "oci")
#: Programs of smaller seeds do not use the features added later, so that known seeds give the same programs as before.
_FIRST_WITH_LATER_FEATURES = 1_000_000
_LATER_FEATURES = ("platforms", "descriptors", "client", "metrics")
#: A step: the delay before it (s), its action, and its arguments by name.
Step = tuple[float, str, dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """A program; ``settings`` are the server's, ``schedule`` is the seed of the order of events."""

    settings: dict[str, Any]
    models: dict[str, dict[str, Any]]
    steps: tuple[Step, ...]
    schedule: int
    slowness: float = 0.0
    stop_midway: bool = False
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def stable(self) -> frozenset[str]:
        """The models that no step replaces or unloads."""
        if self.settings["model_control_mode"] == "on-demand" and self.settings["max_loaded_models"]:
            return frozenset()
        changing = ("load", "unload", "rewrite", "kill")
        return frozenset(self.models) - {arguments["model"] for _, what, arguments in self.steps if what in changing}

    @property
    def unlimited(self) -> bool:
        """Whether every model can be loaded quickly at any time."""
        settings = self.settings
        quick = not self.features & {"faults", "slow", "store", "descriptors"} and all(
            spec.get("load_seconds", 0) < 5 for spec in self.models.values()
        )
        return quick and settings["model_control_mode"] == "on-demand" and not settings["max_loaded_models"]

    def without(self, steps: set[int]) -> Program:
        """Return the program without some steps; later steps keep their times."""
        kept: list[Step] = []
        waited = 0.0
        for index, (seconds, what, arguments) in enumerate(self.steps):
            waited += seconds
            if index not in steps:
                kept.append((waited, what, arguments))
                waited = 0.0
        return replace(self, steps=tuple(kept))


def generate(seed: int) -> Program:
    """Return the program of a seed."""
    return _Generator(random.Random(seed)).program(seed)


class _Generator:
    """Draws one program."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._models: dict[str, dict[str, Any]] = {}
        self._vias = ["core"]
        self._values = 0
        self._sequences = 0
        self._regions: tuple[str, ...] = ()
        #: The model of requests that do not name a model.
        self._default_model = ""

    def program(self, seed: int) -> Program:
        draw = self._random
        mode = draw.choice(["explicit", "explicit", "on-demand", "on-demand", "none", "poll"])
        features = {
            feature
            for feature in (
                "cache",
                "limiter",
                "faults",
                "slow",
                "hangs",
                "http",
                "grpc",
                "store",
                "library",
                "budget",
                "shm",
            )
            if draw.random() < 0.4
        }
        if "cache" in features and draw.random() < 0.4:
            features.add("redis")
        if seed >= _FIRST_WITH_LATER_FEATURES:
            features.update(feature for feature in _LATER_FEATURES if draw.random() < 0.3)
        self._vias = [
            "core",
            *(["http"] if "http" in features else []),
            *(["grpc", "stream"] if "grpc" in features else []),
            *(["library"] if "library" in features else []),
            *(PLATFORMS if "platforms" in features else []),
            *(["client"] if {"client", "http"} <= features else []),
        ]
        self._make_models(mode, features)
        if "platforms" in features:
            cached = [name for name, spec in self._models.items() if spec.get("cache")]
            self._default_model = draw.choice(cached or list(self._models))
        settings = self._settings(mode, features)
        weights = self._weights(mode, features)
        steps = []
        pace = draw.choice([0.0005, 0.005, 0.05, 1.0])
        for _ in range(draw.choice([4, 10, 25, 50])):
            what = draw.choices(list(weights), list(weights.values()))[0]
            steps += self._steps(what, pace)
        return Program(
            settings, self._models, tuple(steps), seed, draw.choice([0, 0.001, 0.01]) if "slow" in features else 0.0,
            draw.random() < 0.2, frozenset(features),
        )  # fmt: skip

    def _settings(self, mode: str, features: set[str]) -> dict[str, Any]:
        draw = self._random
        settings: dict[str, Any] = {
            "model_control_mode": mode,
            "unload_timeout_secs": 20,
            "execute_timeout_secs": 30,
            "finalize_timeout_secs": 5,
            "exit_timeout_secs": draw.choice([1, 10, 30]),
            "model_load_thread_count": draw.choice([1, 2, 4]),
            "exit_on_error": False,
            "allow_http": "http" in features,
            "stored": "store" in features,
            "allow_grpc": "grpc" in features,
            "allow_client_shm": "shm" in features,
            "max_bytes_in_flight": draw.choice([500, 5000]) if "budget" in features else 0,
        }
        names = [name for name in self._models if draw.random() < 0.7]
        if mode == "explicit":
            settings["load_model"] = names
        if mode == "on-demand":
            together = any(spec["kind"] in ("bls", "ensemble") for spec in self._models.values())
            settings["max_loaded_models"] = draw.choice([0, 2] if together else [0, 1, 2])
            settings["memory_budget"] = str(1 << 40)
            settings["min_loaded_secs"] = draw.choice([0, 1, 10])
            settings["load_wait_secs"] = draw.choice([20, 60])
        if mode == "poll":
            settings["repository_poll_secs"] = 2
        if "redis" in features:
            settings["cache_config"] = self._redis_settings()
        elif "cache" in features:
            settings["cache_config"] = [("local", "size", str(draw.choice([700, 2000, 100_000])))]
        if "limiter" in features:
            settings["rate_limit"] = "execution_count"
        if "descriptors" in features:
            settings["worker_template_secs"] = draw.choice([0, 1, 60])
        if self._default_model:
            settings |= {"allow_sagemaker": True, "allow_vertex_ai": True, "allow_oci": True}
            settings |= {"sagemaker_port": 0, "vertex_ai_port": 0, "oci_port": 0}
            settings |= {"vertex_ai_default_model": self._default_model, "oci_default_model": self._default_model}
        return settings

    def _redis_settings(self) -> list[tuple[str, str, str]]:
        draw = self._random
        host, port = REDIS
        given = {"host": host, "port": str(port), "pool_size": draw.choice(["1", "8"])}
        if draw.random() < 0.7:
            given |= dict.fromkeys(("connect_timeout", "socket_timeout", "wait_timeout"), "10000")
        return [("redis", name, value) for name, value in given.items()]

    def _make_models(self, mode: str, features: set[str]) -> None:
        draw = self._random
        for name in "abc"[: draw.choice([1, 2, 3])]:
            kinds = ["plain", "sequence", "decoupled", "bls", "remote", "remote_sequence", "remote_decoupled"]
            kind = draw.choices(kinds, [5, 2, 1, 1, 0.5, 1, 0.5])[0]
            spec: dict[str, Any] = {
                "kind": kind,
                "instances": draw.choice([1, 1, 2]),
                "batch": draw.choice([1, 4]),
                "delay_us": draw.choice([0, 0, 5000]),
                "load_seconds": draw.choice([0, 0, 0.5, 5]),
            }
            if kind.startswith("remote"):
                spec["grpc"] = kind == "remote_decoupled" or draw.random() < 0.5
            if kind == "bls":
                others = [other for other, model in self._models.items() if model["kind"] == "plain"]
                if not others:
                    spec["kind"] = "plain"
                else:
                    spec["calls"] = draw.choice(others)
            if kind == "sequence":
                spec["oldest"] = draw.random() < 0.5
                spec["idle_us"] = draw.choice([100_000, 60_000_000])
            if spec["kind"] == "plain":
                spec["ordered"] = draw.random() < 0.2
                spec["queue"] = draw.choice([0, 0, 2])
                spec["cache"] = "cache" in features and draw.random() < 0.8
            if "limiter" in features and spec["kind"] in (
                "plain",
                "decoupled",
                "sequence",
            ):  # a BLS model would wait for its own call
                spec["resources"] = {"R": draw.choice([1, 1, 2])}
            if "descriptors" in features:
                spec["modules"] = draw.choice([[], [], ["x"], ["y"]])
            if "metrics" in features:
                spec["metrics"] = draw.random() < 0.7
            self._models[name] = spec
        plain = [name for name, spec in self._models.items() if spec["kind"] == "plain"]
        if plain and draw.random() < 0.3:
            steps = [draw.choice(plain) for _ in range(draw.choice([1, 2]))]
            self._models["e"] = {"kind": "ensemble", "steps": steps, "cache": "cache" in features}
            self._models["e"]["batch"] = min(self._models[step]["batch"] for step in steps)

    def _weights(self, mode: str, features: set[str]) -> dict[str, float]:
        weights = {"infer": 10.0, "burst": 2.0, "cancel": 2.0, "sequence": 3.0, "rewrite": 0.5, "quiet": 0.5}
        if mode in ("explicit", "on-demand"):
            weights |= {"load": 1.0, "unload": 1.0, "reload": 1.0}
        if len(self._vias) > 1:
            weights |= {"hang_up": 1.0, "end_stream": 0.5}
        if "faults" in features:
            weights |= {"fault": 1.5, "kill": 0.5, "memory": 0.5}
        if "store" in features:
            weights |= {"store": 0.7, "index": 0.7}
        if any(spec["kind"].startswith("remote") for spec in self._models.values()):
            weights |= {"remote": 1.5}
        if "shm" in features and "http" in features:
            weights |= {"register": 2.0, "unregister": 0.3}
            self._regions = REGIONS
        if "redis" in features:
            weights |= {"redis": 1.0}
        if self._default_model:
            weights |= {"repeat": 2.0}
        if "client" in self._vias:
            weights |= {"break_off": 1.0}
        if "descriptors" in features:
            weights |= {"descriptors": 1.5, "template": 0.5, "kill": 1.0}
        if "metrics" in features:
            weights |= {"kill": 1.5}
        if "hangs" in features:
            weights |= {"hang": 0.5}
        if "slow" in features:
            weights |= {"slow_disk": 0.5}
        return weights

    def _steps(self, what: str, pace: float) -> list[Step]:
        draw = self._random
        name = draw.choice(list(self._models))
        wait = draw.expovariate(1 / pace)
        if (
            what in ("infer", "burst")
            and self._models[name]["kind"] in ("sequence", "remote_sequence")
            and draw.random() < 0.9
        ):
            what = "sequence"
        match what:
            case "infer":
                return [(wait, "infer", self._request(name))]
            case "burst":
                first = self._request(name)
                same = draw.random() < 0.5
                requests = [
                    first | {"client": draw.randrange(4)} if same else self._request(name)
                    for _ in range(draw.choice([2, 3, 8]))
                ]
                return [(0.0 if at else wait, "infer", request) for at, request in enumerate(requests)]
            case "repeat":
                request = self._request(self._default_model, repeated=True) | {"streamed": False}
                ways = [self._way(self._default_model) for _ in range(4)]
                same = {"binary": draw.choice(["outputs", "all"])}
                return [(wait, "infer", request | way | same) for way in ways]
            case "sequence":
                return self._sequence(wait)
            case "cancel":
                return [(wait, "cancel", {"back": draw.choice([1, 1, 2, 5])})]
            case "reload":
                return [(wait, "rewrite", {"model": name}), (0.0, "load", {"model": name})]
            case "rewrite":
                instances = draw.choice([None, 1, 2, 3])
                return [(wait, "rewrite", {"model": name, "instances": instances})]
            case "fault":
                during = draw.choice(["load", "execute", "execute"])
                kinds = {"load": ["fail", "die", "slow"], "execute": ["fail", "die", "stall", "slow"]}
                return [
                    (
                        wait,
                        "fault",
                        {"model": name, "during": during, "fault": draw.choice(kinds[during])}
                        | ({"times": draw.choice([1, 5])} if during == "load" else {}),
                    )
                ]
            case "descriptors":
                return [(wait, what, {"after": draw.randrange(8), "times": draw.choice([1, 1, 3])})]
            case "template":
                return [(wait, what, {"fault": draw.choice(["die", "stall"])})]
            case "memory":
                return [(wait, "memory", {"readings": draw.choice([1, 2, 5])})]
            case "store":
                calls, failures = draw.choice([(0, 1), (0, 5), (1, 0), (6, 0)])
                arguments = {"calls": calls, "seconds": draw.choice([5, 50]), "failures": failures}
                return [(wait, "store", arguments)]
            case "remote":
                arguments = {"server": draw.randrange(2), "seconds": draw.choice([0.1, 5])}
                # A fault of a single request would leave its sequence incomplete, which no server can repair.
                plain = any(spec["kind"] in ("remote", "remote_decoupled") for spec in self._models.values())
                sequences = any(spec["kind"] == "remote_sequence" for spec in self._models.values())
                faults = ["die", "away", *(["drop", "interim", "stall"] if plain and not sequences else ["interim"])]
                accident = (wait, "remote", arguments | {"fault": draw.choice(faults)})
                return [accident, *(self._sequence(0.001) if sequences else [])]
            case "register" | "unregister":
                return [(wait, what, {"region": draw.choice(REGIONS)})]
            case "redis":
                fault = draw.choice(["die", "stall", "refuse", "refuse"])
                return [(wait, "redis", {"fault": fault, "seconds": draw.choice([0.05, 1, 20])})]
            case "index":
                return [(wait, "index", {})] * draw.choice([1, 6])
            case "hang":
                return [(wait, "hang", {"model": name, "seconds": 100})]
            case "slow_disk":
                return [(wait, "slow_disk", {"calls": draw.choice([1, 3, 10]), "seconds": draw.choice([1, 10])})]
            case "hang_up":
                vias = ["http", "grpc", *(PLATFORMS if self._default_model else [])]
                return [(wait, "hang_up", {"via": draw.choice(vias), "client": draw.randrange(4)})]
            case "end_stream":
                return [(wait, "end_stream", {"client": draw.randrange(4)})]
            case "break_off":  # perhaps while a kept-alive connection has a request
                way = {"via": "client", "client": draw.randrange(4), "deadline": 0, "streamed": False, "results": None}
                infers: list[Step] = [(wait, "infer", self._request(name) | way) for _ in range(2)]
                return [*infers, (draw.choice([0.0, 0.002, 0.02]), what, {})]
            case "quiet":
                return [(wait, "quiet", {})]
            case _:
                return [(wait, what, {"model": name})]

    def _request(self, name: str, *, repeated: bool = False) -> dict[str, Any]:
        draw = self._random
        self._values += 1
        repeated = repeated or draw.random() < 0.5
        value = draw.randrange(3) if repeated else 1000 + self._values
        return {
            "model": name,
            "value": value,
            "milliseconds": value if repeated else draw.choice([0, 0, 1, 10, 100, 2000]),
            "count": 1 if repeated else draw.randrange(4),
            "timeout": 0 if repeated else draw.choice([0, 0, 0, 5000, 50_000]),
            **self._way(name),
        }

    def _vias_to(self, name: str) -> list[str]:
        """Return the protocols and ports that reach a model; some platforms have only one model."""
        return [via for via in self._vias if name == self._default_model or via not in ("sagemaker", "oci")]

    def _way(self, name: str) -> dict[str, Any]:
        """Draw the protocol and the connection of a request."""
        draw = self._random
        decoupled = self._models[name]["kind"] in ("decoupled", "remote_decoupled")
        vias = [via for via in self._vias_to(name) if via in ("core", "stream", "library", "client") or not decoupled]
        via = draw.choice(vias)
        way: dict[str, Any] = {"via": via, "client": draw.randrange(4)}
        if self._default_model and via in ("http", *PLATFORMS):
            way["binary"] = draw.choice(["", "outputs", "all"])
        if via in ("library", "client"):
            way["streamed"] = decoupled or draw.random() < 0.2
        if way.get("streamed") and "client" in self._vias:
            way["results"] = draw.choice([None, 0, 1])  # the number of responses after which it cancels
        if via == "http" and self._regions and draw.random() < 0.5:
            way["region"] = draw.choice(self._regions)
        if via in ("grpc", "library", "client"):
            way["deadline"] = draw.choice([0, 0, 5, 200])
        return way

    def _sequence(self, wait: float) -> list[Step]:
        draw = self._random
        models = [name for name, spec in self._models.items() if spec["kind"] in ("sequence", "remote_sequence")]
        if not models:
            return []
        self._sequences += 1
        name, correlation, length = draw.choice(models), self._sequences, draw.choice([1, 2, 5])
        between = draw.choice([0.0, 0.001, 0.2])
        # Separate calls have no order, and pipelined requests wait for each other.
        via = self._way(name) | {
            "via": draw.choice([via for via in self._vias_to(name) if via != "grpc"]),
            "streamed": False,
        }
        steps: list[Step] = []
        for at in range(length):
            request = self._request(name)
            request |= {
                **via,
                "deadline": 0,
                "timeout": 0,
                "correlation": correlation,
                "start": at == 0,
                "end": at == length - 1,
            }
            steps.append((wait if at == 0 else between, "infer", request))
        if draw.random() < 0.1:
            steps.pop()  # the client disconnects
        return steps
