"""Optional packages: their extras, whether they are installed and work, and the commands that install them.

Called by commands, and by workers when they load a model, before the packages are used. The table mirrors
pyproject.toml. Uses only the standard library, Python 3.9.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from conch.core.errors import ConchError, error_text, one_line, unsupported

#: The name of conch's distribution. PyPI has an unrelated package named conch.
DISTRIBUTION = "conch-server"


class Package(NamedTuple):
    """A package: its name for pip, the extras that include it, and the oldest version that works (empty: any).

    Errors name the first of the extras, and ``note``, a remark on the installation. Without extras, the package
    itself is installed.
    """

    name: str
    extras: tuple[str, ...] = ()
    oldest: str = ""
    note: str = ""


#: By import name.
PACKAGES: dict[str, Package] = {
    "torch": Package("torch", ("huggingface",)),
    "transformers": Package("transformers", ("huggingface",), "5.5"),
    "safetensors": Package("safetensors", ("huggingface", "onnxruntime", "openvino")),
    "accelerate": Package("accelerate", ("huggingface",)),
    "gguf": Package("gguf", ("huggingface",), "0.10"),
    "huggingface_hub": Package("huggingface_hub", ("huggingface", "llamacpp", "onnxruntime", "openvino", "stores")),
    "tokenizers": Package("tokenizers", ("huggingface", "llamacpp", "onnxruntime", "openvino")),
    "jinja2": Package("jinja2", ("huggingface", "llamacpp", "openvino"), "3.1.6"),
    "onnxruntime": Package("onnxruntime", ("onnxruntime",), "1.20"),
    "openvino": Package("openvino", ("openvino",), "2025.0"),
    "openvino_genai": Package("openvino-genai", ("openvino",), "2026.4"),
    "llama_cpp": Package(
        "llama-cpp-python",
        ("llamacpp",),
        "0.3.36",
        "pip builds it from source with a C++ compiler, which takes 5 to 10 minutes on two cores",
    ),
    "vllm": Package("vllm", ("vllm",), "0.11"),
    "llguidance": Package("llguidance", ("structured", "llamacpp", "openvino"), "1.9.1"),
    "peft": Package("peft", ("lora",), "0.18"),
    "scipy": Package("scipy", ("audio",)),
    "soundfile": Package("soundfile", ("audio",)),
    "av": Package("av", ("media",), "18"),
    "PIL": Package("pillow", ("image",)),
    "nncf": Package("nncf", ("convert",), "2.15"),
    "onnx": Package("onnx", ("convert",)),
    "onnxscript": Package("onnxscript", ("convert",)),
    "altair": Package("altair", ("report",), "5.5"),
    "vl_convert": Package("vl-convert-python", ("report",), "1.7"),
    "optuna": Package("optuna", ("analyze",), "4"),
    "textual": Package("textual", ("terminal",), "8"),
    "ray": Package("ray[serve]", ("ray",), "2.60"),
    "redis": Package("redis", ("redis",), "5"),
    "fsspec": Package("fsspec", ("stores",), "2025.3"),
    "s3fs": Package("s3fs", ("stores",), "2025.3"),
    "gcsfs": Package("gcsfs", ("stores",), "2025.3"),
    "adlfs": Package("adlfs", ("stores",), "2024.12"),
    "azure.identity.aio": Package("azure-identity", ("stores",)),
    "tritonclient.http": Package("tritonclient[http]"),
    "pynvml": Package("nvidia-ml-py", ("analyze",)),
    "yaml": Package("pyyaml", ("analyze",)),
    "opentelemetry": Package("opentelemetry-sdk", ("opentelemetry",), "1.33"),
    "opentelemetry.exporter.otlp.proto.http": Package(
        "opentelemetry-exporter-otlp-proto-http", ("opentelemetry",), "1.33"
    ),
    "sklearn": Package("scikit-learn"),
}
#: Extras that other extras include.
INCLUDED: dict[str, tuple[str, ...]] = {
    "analyze": ("report",),
    "convert": ("huggingface", "onnxruntime", "openvino", "report"),
}


def load(purpose: str, module: str, *, extra: str = "") -> Any:
    """Import and return ``module``; raises as :func:`require` does."""
    require(purpose, module, extra=extra)
    return sys.modules[module]


def require(purpose: str, *modules: str, extra: str = "") -> None:
    """Import ``modules`` that ``purpose`` (the subject of the error's sentence) needs.

    Raises UNSUPPORTED if modules are missing or outdated, with the command that installs ``extra`` or else their first
    extra, and if an installed module cannot be imported, with the reason.
    """
    packages: list[str] = []
    absent: list[str] = []
    for module in modules:
        package = _package(module)
        installed = version_of(module)
        if outdated(module):
            packages.append(f"{package.name} {package.oldest} or newer (installed is {installed})")
            absent.append(module)
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a compiled library may raise anything
            lacking = _not_found(error)
            # A requirement ``name[part]`` may be installed although the libraries of ``part`` are missing.
            if not f"{module}.".startswith(f"{lacking}.") and not (lacking and "[" in package.name):
                raise _broken(purpose, package.name, installed, error) from error
            name = f"{package.name} ({package.note})" if package.note else package.name
            packages += [name] if name not in packages else []
            absent.append(module)
    if absent:
        listed = ", ".join(packages[:-1]) + " and " + packages[-1] if len(packages) > 1 else packages[0]
        reason = f"{purpose} needs {listed}"
        raise unsupported(f"{reason}: {command_for(*absent, extra=extra)}", public=reason)


def command_for(*modules: str, extra: str = "") -> str:
    """Return the command that installs ``modules``, by ``extra`` or the extras in the table."""
    packages = [_package(module) for module in modules]
    names = [extra or package.extras[0] for package in packages if extra or package.extras]
    brought = {included for name in names for included in INCLUDED.get(name, ())}
    extras = [name for name in dict.fromkeys(names) if name not in brought]
    plain = [] if extra else [_quoted(package.name) for package in packages if not package.extras]
    return " && ".join([command(*extras)] * bool(extras) + [f"{pip_install()} {name}" for name in plain])


def command(*extras: str) -> str:
    """Return the command that adds ``extras`` to this installation of conch.

    For a checkout it is the README's command, and for a wheel that still exists the same with the wheel's path.
    Otherwise it takes the installed version from the package index. If conch itself is not installed, as in the
    environment of a model, the command lists the packages.
    """
    names = ",".join(extras)
    version = installed_version(DISTRIBUTION)
    if not version:
        return f"{pip_install()} {' '.join(_packages_of(extras))}"
    checkout, editable = _checkout()
    if checkout is None:
        wheel = _wheel()
        requirement = f"{DISTRIBUTION}[{names}]=={version}" if wheel is None else f"{wheel}[{names}]"
        # The environment of uvx lies in uv's cache, which is not to be changed.
        installer = "uv tool install" if Path(sys.prefix).parent.name.startswith("archive-v") else pip_install()
        return f'{installer} "{requirement}"'
    in_checkout = checkout == _working_directory()
    constraints = checkout / "constraints.txt"
    options = (
        f"-c {'constraints.txt' if in_checkout else shlex.quote(str(constraints))} " if constraints.is_file() else ""
    )
    return f'{pip_install()} {options}{"-e " if editable else ""}"{"." if in_checkout else checkout}[{names}]"'


def lacks_library(purpose: str, error: ImportError) -> ConchError:
    """Return the error for a ``purpose`` if an import inside a library failed."""
    reason = f"{purpose} needs a library"
    if error.name and isinstance(error, ModuleNotFoundError):
        return unsupported(f"{reason}: {command_for(error.name)}", public=f"{reason}: {_package(error.name).name}")
    return unsupported(f"{reason}: {one_line(error)}")


def version_of(module: str) -> str:
    """Return the version of the package of ``module``; empty if it is not installed under its own name."""
    return installed_version(_package(module).name)


def outdated(module: str) -> str:
    """Return the oldest version that works if an older one is installed; else empty."""
    package, installed = _package(module), version_of(module)
    return package.oldest if installed and _numbers(installed) < _numbers(package.oldest) else ""


def pip_install() -> str:
    """Return the command that installs packages into this environment, without the packages.

    It is ``pip install`` if this environment's pip is the first on the path. Tools that install programs have their
    own command: pipx, and uv, whose environments have no pip.
    """
    own = Path(sys.executable).with_name("pip")
    program = shutil.which("pip")
    if program is not None and Path(program) == own:
        return "pip install"
    if own.exists():
        return f"{_shown(own)} install"
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return f"pipx runpip {DISTRIBUTION} install"
    if find_spec("pip") is None:
        return f"uv pip install --python {_shown(Path(sys.executable))}"
    return f"{_shown(Path(sys.executable))} -m pip install"


def _shown(path: Path) -> str:
    """Return a path for a shell, relative to the current directory if it is below it."""
    try:
        path = path.relative_to(_working_directory() or "")
    except ValueError:
        pass
    return shlex.quote(str(path))


def _working_directory() -> Path | None:
    """Return the current directory; None if it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _package(module: str) -> Package:
    root = module.partition(".")[0]
    return PACKAGES.get(module) or PACKAGES.get(root) or Package(root)


@cache
def installed_version(name: str) -> str:
    """Return the installed version; empty if only another distribution (``onnxruntime-gpu``) is installed."""
    try:
        return metadata.version(name.partition("[")[0])
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; omits a local version (``+cpu``)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def _not_found(error: BaseException | None) -> str:
    """Return the missing module that caused an error, if any; else empty."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        error = error.__cause__
    return ""


def _broken(purpose: str, name: str, version: str, error: Exception) -> ConchError:
    installed = f"{name} {version}".strip()
    lacking = _not_found(error)
    if lacking:
        problem = f"{installed} is installed, but {lacking}, which it imports, is not"
        advice = f": {command_for(lacking)}"
    else:
        problem = f"{installed} is installed, but cannot be imported: {error_text(error, short=True)}"
        advice = f"; reinstall it: {pip_install()} --force-reinstall --no-deps {_quoted(name)}"
    reason = f"{purpose} needs {name}: {problem}"
    return unsupported(f"{reason}{advice}", public=reason)


def _packages_of(extras: tuple[str, ...]) -> list[str]:
    """Return the requirements of the extras, quoted for a shell."""
    every = {name for extra in extras for name in (extra, *INCLUDED.get(extra, ()))}
    packages = [package for package in PACKAGES.values() if every.intersection(package.extras)]
    return [_quoted(package.name + (f">={package.oldest}" if package.oldest else "")) for package in packages]


def _quoted(name: str) -> str:
    return f'"{name}"' if re.search(r"[\[>]", name) else name


def _checkout() -> tuple[Path | None, bool]:
    """Return the folder that conch was installed from, if it exists, and whether conch runs from that folder."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").is_file():
        return root, True
    origin = _origin("dir_info")
    return (origin, False) if origin is not None and (origin / "pyproject.toml").is_file() else (None, False)


def _wheel() -> Path | None:
    """Return the wheel that conch was installed from, if it exists."""
    origin = _origin("archive_info")
    return origin if origin is not None and origin.is_file() else None


def _origin(kind: str) -> Path | None:
    """Return the local path that conch was installed from, if pip recorded this kind of origin."""
    try:
        written = metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(written)
    url = urlsplit(origin.get("url", ""))
    return Path(url2pathname(url.path)) if kind in origin and url.scheme == "file" else None
