"""Every example runs: its repository is served, and its client or the request of its README is answered."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.examples.conftest import EXAMPLES, Run
from tests.servers import ConchServer
from tests.task_checkpoints import image_file, sound_file, tone

pytestmark = pytest.mark.timeout(600)


def generate(server: ConchServer, model: str, **body: Any) -> dict[str, Any]:
    request = Request(f"http://{server.http}/v2/models/{model}/generate", json.dumps(body).encode())
    with urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    assert isinstance(answer, dict)
    return answer


def test_reranking_prints_every_document_best_first(server: ConchServer, run: Run) -> None:
    lines = run("reranking/ask.py", f"--url={server.grpc}").splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 4
    assert scores == sorted(scores, reverse=True)


def test_semantic_search_finds_what_means_the_same(server: ConchServer) -> None:
    answer = generate(server, "search", query="When will my parcel be here?")
    assert answer["document"][0] == "Parcels arrive within three working days."
    assert answer["similarity"] == sorted(answer["similarity"], reverse=True)


def test_semantic_search_answers_rows_and_requests_apart(server: ConchServer) -> None:
    queries = ["How do I change my password?", "When is the shop open?", "Is there a gift card?"]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda query: generate(server, "search", query=query)["document"][0], queries))
    assert [answer.split()[0] for answer in answers] == ["Passwords", "The", "Gift"]


def test_hybrid_search_fuses_the_ranks_of_both_vectors(server: ConchServer, run: Run) -> None:
    lines = run("hybrid_search/search.py", "printer ink", f"--url=http://{server.http}").splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 3
    assert scores == sorted(scores, reverse=True)
    # First by meaning, whatever the random weights of the sparse model say.
    assert any("Ink is delivered" in line for line in lines)


def test_late_interaction_sorts_the_candidates_of_faiss(server: ConchServer, run: Run) -> None:
    lines = run("late_interaction/search.py", f"--url=http://{server.http}").splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 4
    assert scores == sorted(scores, reverse=True)
    assert {line.split(maxsplit=1)[1].split()[0] for line in lines} >= {"Films", "Books"}


@pytest.mark.slow
def test_speech_prints_text_and_chunks(server: ConchServer, run: Run, tmp_path: Path) -> None:
    recording = tmp_path / "recording.wav"
    recording.write_bytes(sound_file(tone(1.5)))
    lines = run("speech/ask.py", recording, f"--url={server.grpc}").split("\n")
    assert lines[0]
    assert all(re.match(r" *\d+\.\d\d s  ", line) for line in lines[1:] if line)


@pytest.mark.slow
def test_tool_is_called_and_its_result_is_read(server: ConchServer, run: Run) -> None:
    output = run("tool_calling/ask.py", f"--url=http://{server.http}/v1")
    call = re.match(r"(?s)weather\((.*?\})\)\n", output)  # random weights write white space, too
    assert call is not None
    assert json.loads(call[1])["city"] in ("Berlin", "Lisbon")
    assert output[call.end() :].strip()


@pytest.mark.slow
def test_cascade_asks_the_large_model_only_where_the_small_one_is_unsure(server: ConchServer) -> None:
    texts = ["I walk to the market.", "Hello!", "Anna Smith takes a bus.", "How can you be sure?", "numbers", "open"]
    by = []
    for text in texts:
        alone = generate(server, "small", text_input=text)
        answer = generate(server, "cascade", text_input=text)
        by.append(answer["answered_by"])
        assert answer["answered_by"] == ("small" if alone["score"][0] >= 0.95 else "large")
        expected = alone if by[-1] == "small" else generate(server, "large", text_input=text)
        assert (answer["label"], answer["score"]) == (expected["label"][0], pytest.approx(expected["score"][0]))
    assert "large" in by


@pytest.mark.slow
def test_adapter_changes_what_the_request_that_names_it_gets(server: ConchServer, repository: Path, run: Run) -> None:
    run("lora/train.py", "--steps=40", f"--target={repository / 'storyteller' / 'adapters' / 'pirate'}")
    body = {"text_input": "Good morning", "max_tokens": 12, "exclude_input_in_output": True}
    plain = generate(server, "storyteller", **body)
    adapted = generate(server, "storyteller", **body, sampling_parameters='{"lora_name": "pirate"}')
    assert plain["text_output"] != adapted["text_output"]
    assert plain["text_output"] == generate(server, "storyteller", **body)["text_output"]


@pytest.mark.slow
def test_ensemble_classifies_the_masked_text(server: ConchServer) -> None:
    answer = generate(server, "review", text="Write to ada@example.org or call 030 123456.")
    assert answer["redacted"] == "Write to [mail] or call [phone]."
    alone = generate(server, "sentiment", text_input=answer["redacted"])
    assert (answer["label"], answer["score"]) == (alone["label"], pytest.approx(alone["score"]))


@pytest.mark.slow
def test_streaming_sends_pieces_that_join_to_what_generate_writes(server: ConchServer, hub: Path) -> None:
    import transformers

    folder = next((hub / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots").iterdir())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer("I am going to", return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=12)[0, tokens["input_ids"].shape[1] :]

    body = json.dumps({"prompt": "I am going to", "max_new_tokens": 12}).encode()
    with urlopen(Request(f"http://{server.http}/v2/models/writer/generate_stream", body), timeout=60) as reply:
        events = [json.loads(line[6:]) for line in reply.read().decode().split("\n") if line.startswith("data: ")]
    assert len(events) > 1
    assert "".join(event["text"] for event in events) == tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.slow
def test_custom_batcher_runs_texts_of_one_length_together_and_answers_as_the_embedder(server: ConchServer) -> None:
    texts = [*["Where is the library?"] * 6, "A longer sentence, which says rather more about the way to the station."]
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: generate(server, "buckets", text=text), texts))
    for text, answer in zip(texts, answers, strict=True):
        expected = generate(server, "embedder", text_input=text)["embedding"]
        np.testing.assert_allclose(answer["embedding"], expected, atol=1e-5)
        rows, columns = answer["batch"]
        assert (rows <= 6, columns <= 8) == (True, True) if text == texts[0] else (rows, columns > 8) == (1, True)


@pytest.mark.slow
def test_custom_batcher_refuses_what_is_not_text_and_continues(server: ConchServer) -> None:
    import tritonclient.grpc as grpcclient

    with grpcclient.InferenceServerClient(server.grpc) as client:
        outcome: list[Any] = []
        client.start_stream(lambda result, error: outcome.append(error))
        tensor = grpcclient.InferInput("text", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"\xff"], np.object_))
        client.async_stream_infer("buckets", [tensor])
        client.stop_stream()
    assert "can't decode byte 0xff" in str(outcome[0])
    assert generate(server, "buckets", text="Hello!")["batch"][0] == 1


@pytest.mark.slow
def test_image_classifier_prints_labels_best_first(server: ConchServer, run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(image_file())
    lines = run("image_classifier/ask.py", picture, "--top-k=3", f"--url={server.grpc}").splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 3
    assert scores == sorted(scores, reverse=True)


def test_every_example_has_a_readme_that_says_how_to_serve_it_and_is_in_the_table() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    assert len(folders) == 12
    table = (EXAMPLES / "README.md").read_text()
    for name in folders:
        assert f"[{name}]({name})" in table
        assert "conch serve --model-repository models" in (EXAMPLES / name / "README.md").read_text()
