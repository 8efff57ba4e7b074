"""Opening a checkpoint: what its files say, and one clear error for what they lack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Manifest, Source, Variant, hashes
from conch.checkpoints.options import Options
from tests.unit.checkpoints.folders import WEIGHTS, checkpoint, refusal

CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}


def test_complete_folder_opens(tmp_path: Path) -> None:
    opened = Checkpoint.open(checkpoint(tmp_path, {"max_position_embeddings": 64}), Options())

    assert (opened.directory, opened.source, opened.revision) == (tmp_path, str(tmp_path), "")
    assert (opened.task, opened.labels, opened.max_length, opened.engine) == ("feature-extraction", None, 64, "torch")
    assert opened.has("config.json", "tokenizer.json") and not opened.has("config.json", "vocab.txt")
    assert opened.path("vocab.txt") is None and opened.json("vocab.json") is None


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config__json", "lacks config.json"),
        ("tokenizer__json", "has no tokenizer: tokenizer.json (or vocab.txt, spiece.model …) is missing"),
        (
            "model__safetensors",
            "has no weights: model.safetensors or pytorch_model.bin is missing",
        ),
    ],
)
def test_missing_file_is_named_with_its_folder(tmp_path: Path, missing: str, message: str) -> None:
    assert refusal(checkpoint(tmp_path, **{missing: None})) == f"checkpoint {tmp_path} {message}"


def test_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"checkpoint folder {tmp_path / 'none'} does not exist"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "sentence_bert_config.json", "modules.json"])
@pytest.mark.parametrize("text", ["{", "3"])
def test_broken_json_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    checkpoint(tmp_path, **{name.replace(".", "__"): text})
    assert f"{tmp_path / name} " in refusal(tmp_path)


def test_weights_of_another_library_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, model__safetensors=None, tf_model__h5=b"h5")
    assert "the format of 'tf_model.h5' is not supported here" in refusal(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    checkpoint(
        tmp_path, model__safetensors=None, **{"model-1__safetensors": WEIGHTS, "model__safetensors__index__json": index}
    )
    assert refusal(tmp_path).endswith("lacks model-2.safetensors, of 2 files that model.safetensors.index.json lists")


def test_pointer_in_place_of_the_weights_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, model__safetensors="version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "is a Git LFS pointer, not the weights" in refusal(tmp_path)


def safetensors(end: int, name: str = "w") -> bytes:
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (safetensors(8)[:-1], "was cut off: it has"),
        (safetensors(8)[:20], "is not a safetensors file, or it was cut off in its header"),
        (b"", "is not a safetensors file"),
        (b"\xff" * 40, "is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        ((7).to_bytes(8, "little") + b'{"w":3}', "is not a safetensors file: its header is invalid"),
    ],
)
def test_weights_that_were_cut_off_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    assert f"{tmp_path / 'model.safetensors'} {message}" in refusal(checkpoint(tmp_path, model__safetensors=data))


def test_graph_beside_the_configuration_is_used(tmp_path: Path) -> None:
    opened = Checkpoint.open(checkpoint(tmp_path, model__onnx=b"onnx"), Options())

    assert (opened.engine, opened.graph_file("onnxruntime")) == ("onnxruntime", tmp_path / "model.onnx")


def test_graph_in_a_folder_of_its_own_is_used_when_asked_for(tmp_path: Path) -> None:
    checkpoint(tmp_path, **{"onnx/model__onnx": b"onnx"})

    assert Checkpoint.open(tmp_path, Options()).engine == "torch"
    assert Checkpoint.open(tmp_path, Options(engine="onnxruntime")).graph_file("onnxruntime") is not None


def test_graph_without_its_weights_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, openvino_model__xml="<net/>", model__safetensors=None)
    assert refusal(tmp_path).endswith("lacks openvino_model.bin, the weights of openvino_model.xml")


def test_engine_without_its_files_is_refused(tmp_path: Path) -> None:
    message = refusal(checkpoint(tmp_path), Options(engine="openvino"))
    assert message.endswith(
        "no weights for engine 'openvino': openvino_model.xml with its .bin is missing (conch convert writes it)"
    )


def test_tokenizer_of_bytes_needs_no_vocabulary(tmp_path: Path) -> None:
    checkpoint(tmp_path, tokenizer__json=None, tokenizer_config__json={"tokenizer_class": "ByT5Tokenizer"})
    assert Checkpoint.open(tmp_path, Options()).task == "feature-extraction"


def test_image_model_needs_no_tokenizer(tmp_path: Path) -> None:
    processor = {"image_processor_type": "ViTImageProcessor"}
    vit = {"architectures": ["ViTForImageClassification"]}
    checkpoint(tmp_path, vit, tokenizer__json=None, preprocessor_config__json=processor)
    assert Checkpoint.open(tmp_path, Options()).task == "image-classification"


@pytest.mark.parametrize("task", ["image-classification", "asr", "audio-classification"])
def test_task_of_images_or_sound_over_a_checkpoint_for_text_is_refused(tmp_path: Path, task: str) -> None:
    message = refusal(checkpoint(tmp_path), Options(task=task))
    assert "lacks preprocessor_config.json, which task '" in message


def test_task_of_text_over_a_checkpoint_for_images_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"model_type": "vit"}, tokenizer__json=None, preprocessor_config__json={})
    assert "has no tokenizer" in refusal(tmp_path, Options(task="text-classification"))


def test_task_of_text_over_a_checkpoint_for_sound_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"model_type": "wav2vec2"}, preprocessor_config__json={})
    message = refusal(tmp_path, Options(task="feature-extraction"))
    assert "task 'feature-extraction' reads text, but" in message and "is a wav2vec2, which reads audio" in message


@pytest.mark.parametrize(("names", "told"), [("BertModel", '"BertModel"'), ([1], "[1]"), ({"a": 1}, '{"a": 1}')])
def test_architectures_that_are_no_list_of_names_are_refused(tmp_path: Path, names: Any, told: str) -> None:
    message = refusal(checkpoint(tmp_path, {"architectures": names}))
    assert message.endswith(f'architectures must be a list of names such as ["BertModel"], not {told}')


def test_task_may_be_set_and_has_other_names(tmp_path: Path) -> None:
    assert Checkpoint.open(checkpoint(tmp_path), Options(task="ner")).task == "token-classification"


def test_task_that_cannot_be_told_is_to_be_set(tmp_path: Path) -> None:
    message = refusal(checkpoint(tmp_path, {"architectures": ["Strange"]}))
    assert (
        "cannot be determined (architectures: Strange): set parameter 'task' in config.pbtxt or model.json" in message
    )


def test_model_card_tells_the_task(tmp_path: Path) -> None:
    checkpoint(tmp_path, CLASSIFIER, README__md="---\npipeline_tag: zero-shot-classification\n---\n")
    assert Checkpoint.open(tmp_path, Options()).task == "zero-shot-classification"


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({"id2label": {"1": "B", "0": "A"}}, ["A", "B"]),
        ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"id2label": {"0": "A", "1": "B"}, "label2id": {"A": 0, "B": "1", "other": 5}}, ["A", "B"]),
        ({"id2label": {"0": "same", "1": "same"}, "label2id": {"same": 1}}, ["same", "same"]),
    ],
)
def test_labels_are_by_index(tmp_path: Path, config: dict[str, Any], labels: list[str]) -> None:
    assert Checkpoint.open(checkpoint(tmp_path, {**CLASSIFIER, **config}), Options()).labels == labels


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"0": "A", "1": "B"}, "num_labels": 3}, "id2label has 2 labels, but num_labels is 3"),
        ({"id2label": {"0": "A", "2": "B"}}, "id2label has 2 labels, but none for class 1"),
        ({"id2label": {"1": "A", "2": "B"}}, "id2label has 2 labels, but none for class 0"),
        ({"id2label": {"a": "A"}}, "id2label has an index that is not a number"),
        ({"id2label": ["A", "B"]}, "id2label must map class indices to labels"),
        ({"id2label": {}}, "id2label must map class indices to labels"),
        ({"num_labels": 0}, "num_labels must be a positive number, not 0"),
        (
            {"id2label": {"0": "A", "1": "B"}, "label2id": {"A": 1, "B": 0}},
            "class 0 has the label 'A' in id2label, but label2id maps it to 1",
        ),
    ],
)
def test_labels_that_disagree_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    checkpoint(tmp_path, {**CLASSIFIER, **config})
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'}: {message}"


@pytest.mark.parametrize("head", ["classifier.weight", "classifier.out_proj.weight", "score.weight"])
def test_labels_that_the_weights_have_no_classes_for_are_refused(tmp_path: Path, head: str) -> None:
    three = {**CLASSIFIER, "id2label": {"0": "A", "1": "B", "2": "C"}}
    checkpoint(tmp_path, three, model__safetensors=safetensors(8, head))
    assert refusal(tmp_path).endswith(f"has 3 labels in config.json, but its weights ({head}) have 2 classes")


@pytest.mark.parametrize(
    ("config", "files", "length"),
    [
        ({}, {}, 512),
        ({"max_position_embeddings": 128}, {}, 128),
        ({"max_position_embeddings": 128}, {"tokenizer_config.json": {"model_max_length": 10**30}}, 128),
        ({"max_position_embeddings": 512}, {"tokenizer_config.json": {"model_max_length": 128}}, 128),
        ({"max_position_embeddings": 512}, {"sentence_bert_config.json": {"max_seq_length": 256}}, 256),
        ({"max_position_embeddings": 512}, {"sentence_bert_config.json": {"max_seq_length": None}}, 512),
        ({"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}, {}, 512),
        ({"max_position_embeddings": 130, "model_type": "roberta", "pad_token_id": 0}, {}, 129),
        (
            {"text_config": {"max_position_embeddings": 77}, "model_type": "clip"},
            {"preprocessor_config__json": {}},
            77,
        ),
    ],
)
def test_least_of_the_limits_is_the_maximum_length(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], length: int
) -> None:
    checkpoint(tmp_path, config, **{name.replace(".", "__"): content for name, content in files.items()})
    assert Checkpoint.open(tmp_path, Options()).max_length == length


def test_maximum_length_may_be_set_as_far_as_there_are_positions(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"max_position_embeddings": 512}, sentence_bert_config__json={"max_seq_length": 256})

    assert Checkpoint.open(tmp_path, Options(max_length=512)).max_length == 512
    assert refusal(tmp_path, Options(max_length=513)) == (
        "parameter 'max_length' is 513; the model has positions for 512 tokens"
    )


def test_code_that_comes_with_the_model_must_be_trusted(tmp_path: Path) -> None:
    config = {"model_type": "brand-new", "auto_map": {"AutoModel": "modeling.New"}}
    checkpoint(tmp_path, config)

    assert "set parameter 'trust_remote_code' to true if you trust it" in refusal(tmp_path)
    assert Checkpoint.open(tmp_path, Options(trust_remote_code=True)).task == "feature-extraction"


@pytest.mark.extras
def test_code_that_is_not_needed_is_not_asked_about(tmp_path: Path) -> None:
    known = checkpoint(tmp_path / "known", {"auto_map": {"AutoModel": "modeling.Bert"}})
    graph = checkpoint(
        tmp_path / "graph", {"model_type": "brand-new", "auto_map": {"AutoModel": "m.New"}}, model__onnx=b"onnx"
    )

    assert Checkpoint.open(known, Options()).engine == "torch"
    assert Checkpoint.open(graph, Options()).engine == "onnxruntime"


def converted(folder: Path) -> Path:
    checkpoint(folder, int8__onnx=b"onnx")
    variants = (
        Variant("torch-fp32", "torch", "fp32", passed=True),
        Variant("onnxruntime-int8", "onnxruntime", "int8", "int8.onnx", passed=True),
    )
    Manifest(Source("org/name"), "feature-extraction", variants, "onnxruntime-int8", hashes(folder)).write(folder)
    return folder


def test_converted_model_runs_the_variant_that_was_found_best(tmp_path: Path) -> None:
    opened = Checkpoint.open(converted(tmp_path), Options())

    assert opened.variant is not None and opened.variant.name == "onnxruntime-int8"
    assert (opened.engine, opened.graph_file("onnxruntime")) == ("onnxruntime", tmp_path / "int8.onnx")


def test_converted_model_runs_the_variant_that_is_asked_for(tmp_path: Path) -> None:
    opened = Checkpoint.open(converted(tmp_path), Options(variant="torch-fp32"))

    assert (opened.engine, opened.graph_file("onnxruntime")) == ("torch", None)


def test_converted_model_that_was_changed_is_refused(tmp_path: Path) -> None:
    (converted(tmp_path) / "tokenizer.json").write_text('{"other": 1}')
    assert f"{tmp_path / 'tokenizer.json'} is not the file that was converted" in refusal(tmp_path)


def test_variant_of_a_model_that_was_not_converted_is_refused(tmp_path: Path) -> None:
    message = refusal(checkpoint(tmp_path), Options(variant="x"))
    assert message == f"parameter 'variant' is 'x', but {tmp_path} has no conch.json with variants"


def test_opening_imports_no_engine(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from conch.checkpoints.folder import Checkpoint;"
        f"Checkpoint.open(Path({str(checkpoint(tmp_path))!r}));"
        "print({'torch', 'transformers', 'huggingface_hub', 'onnxruntime'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_files_that_answers_depend_on_are_reported(tmp_path: Path) -> None:
    version, elsewhere = tmp_path / "model" / "1", checkpoint(tmp_path / "elsewhere")
    (version / "adapter").mkdir(parents=True)
    opened = Checkpoint.open(version, Options(model=str(elsewhere)))
    opened.named_path("lora_modules", "adapter")
    assert opened.dependencies == [("path", str(elsewhere)), ("path", str(version / "adapter"))]


@pytest.mark.parametrize("module", ["modeling.Model", "org/other--modeling.Model"])
def test_code_of_another_repository_is_reported(tmp_path: Path, module: str) -> None:
    folder = checkpoint(tmp_path, {"auto_map": {"AutoModel": module}})
    kinds = [kind for kind, _ in Checkpoint.open(folder, Options(trust_remote_code=True)).dependencies]
    assert kinds == ["path", *(["unknown"] if "--" in module else [])]
