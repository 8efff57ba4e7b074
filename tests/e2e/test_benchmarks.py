"""Every benchmark starts, asks every server that can be had here, and writes its tables; the figures mean nothing.

Peers whose environment or program takes minutes to make (``benchmarks/peers/environment.py``, ``llama.py``) are asked
where that has been done before.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import columns as text_columns
from benchmarks import converted
from benchmarks.exporters import architectures
from benchmarks.generation.columns import USUAL
from benchmarks.layers import STAGES
from benchmarks.peers import environment, llama
from benchmarks.retrieval.columns import PEERS
from tests.oracle import OracleUnavailable, install

ROOT = Path(__file__).parents[2]
VARIANT = "onnxruntime-int8"
#: Programs that the tests below start, and those that these start in turn.
STARTED = {
    "__main__", "serving", "agreement", "layers", "huggingface", "direct", "offline", "inside", "generation.__main__",
    "exporters.__main__", "day_zero.__main__", "soak.__main__", "load_cycles", "queueing", "analyze_modes",
    "tutorial_story", "sequences", "features", "remote", "gguf_types", "grpc_servers",
    "retrieval.__main__", "speech",
}  # fmt: skip
#: Needs a cluster, which takes long to start: tests/deploy/ray starts it on theirs.
STARTED_ELSEWHERE = {"cluster"}
STARTED_BY_THEM = {"load", "peers.padding", "peers.grpc_aio", "generation.client", "generation.alone"}
#: Programs that are run once, ahead of a benchmark with peers, and the peer that runs in an environment of its own.
PREPARING = {"peers.embeddings", "peers.graph", "peers.llama", "peers.web", "generation.unpack"}

pytestmark = pytest.mark.timeout(900 if environment.installed() else 180)


@pytest.fixture(scope="module", autouse=True)
def oracle() -> None:
    """perf_analyzer drives most benchmarks, and the real Triton is their peer."""
    try:
        install()
    except OracleUnavailable as error:
        pytest.skip(f"the real Triton is not available here: {error}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM as ``conch convert`` makes it, with as little measuring as there can be."""
    least = ("--backend", "onnxruntime", "--seconds", "0", "--batch-size", "1", "--seq-len", "16")
    return converted.convert(tmp_path_factory.mktemp("converted"), *least)


def run(module: str, *arguments: object) -> str:
    """What a benchmark prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def tables(output: str) -> list[list[list[str]]]:
    """The cells of every Markdown table, heads first and without the line below them."""
    blocks = re.findall(r"(?:^\|.*\n)+", output, re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in [block[0], *block[2:]]] for block in rows]


def number(cell: str) -> float:
    return float(cell.strip("*"))


def test_every_program_is_known_here() -> None:
    files = {path.relative_to(ROOT / "benchmarks"): path.read_text("utf-8") for path in ROOT.glob("benchmarks/**/*.py")}
    programs = {
        ".".join(path.with_suffix("").parts)
        for path, source in files.items()
        if '__name__ == "__main__"' in source or path.name == "__main__.py"
    }
    assert programs == STARTED | STARTED_ELSEWHERE | STARTED_BY_THEM | PREPARING


@pytest.mark.slow
def test_serving_measures_both_servers() -> None:
    (table,) = tables(run("benchmarks", "serving", "--rounds", 1, "--seconds", 0.1))
    assert len(table) == 1 + 8
    for _, _, conch, triton, ratio, _ in table[1:]:
        assert number(conch) > 0 and number(triton) > 0 and number(ratio) > 0


@pytest.mark.slow
def test_features_measures_both_servers() -> None:
    output = run("benchmarks.features", "--rounds", 1, "--seconds", 0.1, "--models", 1)
    (table,) = tables(output)
    assert len(table) == 1 + 15
    for title, _, conch, triton, ratio, _ in table[1:]:
        assert number(conch) > 0 and number(triton) > 0 and number(ratio) > 0, title
    assert re.search(r"With 1 more models loaded, the latency of a request is \d+\.\d\d times", output)


@pytest.mark.slow
def test_grpc_servers_are_measured_and_attacked() -> None:
    figures, attacks = tables(
        run("benchmarks.grpc_servers", "--rounds", 1, "--seconds", 0.1, "--attack", "large_metadata")
    )
    assert len(figures) == 1 + 4
    for title, _, conch, aio, ratio, _ in figures[1:]:
        assert number(conch) > 0 and number(aio) > 0 and number(ratio) > 0, title
    assert all(outcome.endswith("MiB") for outcome in attacks[1][1:]), attacks


@pytest.mark.slow
def test_remote_asks_directly_and_through_another_server() -> None:
    (table,) = tables(run("benchmarks.remote", "--rounds", 1, "--seconds", 0.1))
    assert [row[0] for row in table[1:]] == [
        f"{what}, {protocol}" for what in ("BYTES identity", "1 MiB FP32 in and out") for protocol in ("HTTP", "gRPC")
    ]
    assert all(number(cell) > 0 for row in table[1:] for cell in row[1:3])


@pytest.mark.slow
def test_agreement_asks_both_tools() -> None:
    (table,) = tables(run("benchmarks.agreement", "--rounds", 1, "--seconds", 0.5, "--levels", 2))
    assert [row[:2] for row in table[1:]] == [["http", "2"], ["grpc", "2"]]
    assert all(number(cell) > 0 for row in table[1:] for cell in row[2:] if "–" not in cell)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_layers_follow_requests_through_all_stages(protocol: str) -> None:
    output = run("benchmarks.layers", "--protocol", protocol, "--seconds", 0.2)
    assert re.search(rf"{protocol}: the client sees \d+ µs", output)
    (table,) = tables(output)
    assert [row[0] for row in table[1:]] == [*list(STAGES.values())[1:], "sum"]
    assert number(table[-1][1]) > 0


@pytest.mark.slow
def test_huggingface_asks_all_servers(folder: Path) -> None:
    peers = list(text_columns.PEERS) if environment.installed() else ["padding"]
    options = ["--rounds", 1, "--seconds", 0.2, "--texts", 16, "--variants", VARIANT]
    output = run("benchmarks.huggingface", "--converted", folder, *options, "--peers", *peers)
    absolute, ratios, offline, layers = tables(output)
    names = absolute[0][2:]
    assert len(names) == 1 + len(peers)
    for title, _, *cells in absolute[1:]:
        answered = {name for name, cell in zip(names, cells, strict=True) if cell}
        silent = {name for name in names if name.startswith("padding") and "mixed" not in title}
        silent |= {"FastAPI"} & set(names) if "perf_analyzer" in title else set()
        assert answered == set(names) - silent, title
    assert len(ratios) == len(absolute)
    assert {row[0] for row in offline[1:]} == {"16 tokens", "mixed"}
    assert number(layers[-1][2]) > 0


@pytest.mark.slow
def test_direct_and_offline_are_programs_too(folder: Path) -> None:
    options = ["--converted", folder, "--variants", VARIANT, "--seconds", 0.1]
    (layers,) = tables(run("benchmarks.direct", *options))
    assert number(layers[-1][2]) > 0
    figures = json.loads(run("benchmarks.offline", *options, "--texts", 4))
    assert min(*figures["engine"].values(), *figures["everything"].values(), *figures["steps"].values()) > 0
    (shapes,) = tables(run("benchmarks.inside", *options, "--rounds", 1, "--shapes", "1x16", "9x128"))
    assert [row[0] for row in shapes[1:]] == ["1x16", "9x128"]
    assert all(number(row[1]) > 0 and number(row[2]) > 0 for row in shapes[1:])


@pytest.mark.slow
def test_generation_asks_all_servers() -> None:
    peers = [name for name in USUAL if (llama.PROGRAM.exists() if name == "llama.cpp" else environment.installed())]
    conch = ["gguf", *(["gguf:llamacpp"] if find_spec("llama_cpp") is not None else [])]
    output = run("benchmarks.generation", "--quick", "--seconds", 0.5, "--conch", *conch, "--peers", *peers)
    servers, absolute, *rest = tables(output)
    names = [*(f"conch {checkpoint}" for checkpoint in conch), *peers]
    assert [row[0] for row in servers[1:]] == names == absolute[0][2:]
    for title, _, *cells in absolute[1:]:
        answered = {name for name, cell in zip(names, cells, strict=True) if cell}
        lacking = {"triton", "transformers"} if "schema" in title else {"triton"} if "streams" in title else set()
        assert answered == set(names) - lacking, title
    alone = rest[-1]
    assert number(alone[1][3]) > 0


@pytest.mark.slow
def test_retrieval_asks_all_servers_and_engines(tmp_path: Path) -> None:
    peers = [name for name, place in PEERS.items() if environment.installed(place)]
    options = ["--rounds", 1, "--seconds", 0.1, "--texts", 16, "--documents", 4, "--home", tmp_path]
    servers, engines = tables(run("benchmarks.retrieval", "--quick", *options, "--peers", *peers))
    assert servers[0][2 : 3 + len(peers)] == ["conch", *peers]
    assert [row[0] for row in servers[1:]] == [
        "16 tokens, 1 caller", "mixed, 1 caller", "mixed, 16 callers", "mixed, 64 callers",
        "mixed, 1,024 dimensions, 16 callers",
    ]  # fmt: skip
    assert all(number(row[2]) > 0 for row in servers[1:])
    assert len(engines) == 1 + 5
    assert all(number(row[2]) > 0 and number(row[3]) > 0 for row in engines[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("question", "architecture"), [("encoders", "roberta"), ("causal", "mistral:window")])
def test_exporters_compare_one_architecture(question: str, architecture: str) -> None:
    options = ["--exporters", "conch", "--architectures", architecture]
    (table,) = tables(run("benchmarks.exporters", question, *options))
    assert table[0] == ["architecture", "conch"]
    [[name, difference]] = table[1:]
    assert name == architecture and number(difference) < 1e-3


@pytest.mark.slow
def test_gguf_types_compares_an_engine_with_the_dequantised_file() -> None:
    output = run(
        "benchmarks.gguf_types", "--types", "Q4_K", "Q5_0", "--engines", "openvino", "--layers", 1, "--tokens", 2
    )
    assert re.search(r"\| Q4_K \| 20 of 20, 0\.0\d+ \|\n\| Q5_0 \| refused \|", output)


@pytest.mark.slow
def test_speech_compares_precisions_of_whisper_with_pytorch() -> None:
    (table,) = tables(run("benchmarks.speech", "--size", "smallest", "--tokens", 2, "--rounds", 1))
    assert [row[:2] for row in table[1:]] == [
        ["smallest", name] for name in ("torch fp32", "openvino fp32", "openvino int8")
    ]


@pytest.mark.slow
def test_day_zero_compares_architectures_of_each_task(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    options = ["--architectures", "bert", "vit", "sew", "gpt2", "--results", results, "--write", page]
    run("benchmarks.day_zero", "sequence-classification", "image-classification", "audio-classification", *options)
    summary = tables(page.read_text())[0]
    assert summary[1:] == [
        ["sequence-classification", "2", "2", "100.0%", "0", "0"],
        ["image-classification", "1", "1", "100.0%", "0", "0"],
        ["audio-classification", "1", "1", "100.0%", "0", "0"],
        ["all", "4", "4", "100.0%", "0", "0"],
    ]
    assert len(results.read_text().splitlines()) == 4


@pytest.mark.slow
def test_day_zero_compares_models_for_retrieval_with_sentence_transformers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    models = ["default-prompt", "bag-of-words", "splade-active", "multi-vector-fixed", "reranker-prompt"]
    run("benchmarks.day_zero", "--only", "retrieval", "--architectures", *models, "--write", page)
    summary, others = tables(page.read_text())
    assert summary[1:] == [
        ["dense", "2", "1", "1", "0", "0"],
        ["sparse", "1", "1", "0", "0", "0"],
        ["multi-vector", "1", "1", "0", "0", "0"],
        ["reranker", "1", "1", "0", "0", "0"],
        ["all", "5", "4", "1", "0", "0"],
    ]
    assert others[1][:2] == ["dense-bag-of-words", "refused"] and "'BoW', which is not supported" in others[1][2]


@pytest.mark.slow
def test_the_soak_answers_every_request_while_things_break() -> None:
    output = run("benchmarks.soak", "--minutes", 0.1, "--clients", 8)
    answered = re.search(r"([\d,]+) right answers \((.*)\)", output)
    asked = {"echo", "encoder", "repeat", "writer", "plain", "cached", "limited", "ragged", "shared", "relay"}
    assert answered and asked <= set(re.findall("[a-z]+", answered[2])), output
    assert re.search(r"requests of sequences: .*right \d", output), output
    assert re.search(r"faults: .*\d", output), output


@pytest.mark.slow
def test_sequences_lose_nothing_while_clients_give_up_and_workers_are_killed() -> None:
    output = run("benchmarks.sequences", "--seconds", 2, "--kill-every", 0.7)
    found = re.search(r"given up ([\d,]+), right ([\d,]+)", output)
    assert found and all(number(count.replace(",", "")) > 0 for count in found.groups()), output


@pytest.mark.slow
def test_exporters_are_timed(tmp_path: Path) -> None:
    architectures.write(tmp_path, "llama", "AutoModelForCausalLM", {**architectures.SIZES, **architectures.GROUPED})
    options = ["--causal", "--exporters", "conch", "--exports", 1, "--rounds", 1]
    output = run("benchmarks.exporters", "speed", tmp_path, *options)
    figures = re.findall(
        r"^(graph|served), (prefill|decode): conch openvino_model.xml ([0-9.]+) ms", output, re.MULTILINE
    )
    assert len(figures) == 4 and all(float(milliseconds) > 0 for *_, milliseconds in figures), output


@pytest.mark.slow
def test_measurements_are_what_queueing_theory_expects() -> None:
    (table,) = tables(run("benchmarks.queueing", "--seconds", 0.5))
    assert len(table) == 1 + 8 + 3 + 2 + 2
    assert all(number(expected) >= 0 and number(measured) > 0 for _, _, expected, measured, _ in table[1:])


@pytest.mark.slow
def test_modes_of_the_analyzer_search_the_same_space() -> None:
    options = [
        "--model",
        "minilm_tokenizer",
        "--modes",
        "brute",
        "quick",
        "--instances",
        1,
        "--batches",
        2,
        "--sweep",
        "batch",
        "--concurrency",
        2,
    ]
    (table,) = tables(run("benchmarks.analyze_modes", *options, "--seconds", 0.1, "--rounds", 1))
    assert [row[0] for row in table[1:]] == ["brute", "quick"]
    assert all(number(row[1]) > 0 and number(row[6]) > 0 for row in table[1:])


@pytest.mark.slow
def test_the_tutorials_story_runs_to_its_end(tmp_path: Path) -> None:
    output = run("benchmarks.tutorial_story", "--quick", "--output", tmp_path)
    steps = tables(output)[-1]
    assert [row[1] for row in steps[1:]] == ["1", "2"]
    assert all(number(cell) > 0 for row in steps[1:] for cell in row[2:])
    assert (tmp_path / "3-analysis" / "analysis.html").stat().st_size > 10_000
