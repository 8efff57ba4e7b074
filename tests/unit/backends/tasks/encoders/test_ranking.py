"""Scores of pairs equal those of sentence-transformers' CrossEncoder for folders that it saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import Qwen3Config
from transformers.models.auto import modeling_auto

from conch.backends.base.arrays import Array, Result
from conch.backends.tasks.causal import torch_class
from conch.backends.tasks.encoders.ranking import Rerank, common_length
from conch.backends.tasks.engines import open_engine
from conch.backends.tasks.huggingface_backend import describe_task, make_task
from conch.backends.tasks.task import ExecutionWork, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.causal_rerankers import CHAT, FAMILIES, SIZES, STRUCTURED, language_model, logit_scorer, tokenizer
from tests.text_checkpoints import TEXTS, answer, request, write

QUERY = "Where is the library, and is it open?"
LONG = " ".join(TEXTS * 3)
DOCUMENTS = [*TEXTS, "", LONG, "  two words  \n", "Ünïque 北京 🙂"]
HEAD = "AutoModelForSequenceClassification"


def served(folder: Path, **options: Any) -> Task:
    """The task that the backend makes of a folder whose task nobody names."""
    checkpoint = Checkpoint.open(folder, Options.from_values(options))
    assert checkpoint.task == "text-ranking"
    return make_task(checkpoint, lambda head: open_engine(checkpoint, head=head, torch_class=torch_class(head)))


def scores(task: Task, documents: Sequence[str] = DOCUMENTS, query: str = QUERY, **inputs: Any) -> Array:
    count = len(documents)
    inputs = {name: [value] * count for name, value in inputs.items()}
    result = answer(task, request("score", text_input=[query] * count, text_pair=list(documents), **inputs))
    score = result.outputs["score"]
    assert isinstance(score, np.ndarray) and score.dtype == np.float32
    return score


def oracle(folder: Path, documents: Sequence[str] = DOCUMENTS, query: str = QUERY, **arguments: Any) -> Array:
    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    # One at a time: it pads on the left without position ids, which changes networks with absolute positions.
    found = model.predict([(query, document) for document in documents], batch_size=1, **arguments)
    return np.asarray(found).reshape(len(documents), -1)


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


def saved(folder: Path, labels: int, family: str = "bert", **settings: Any) -> Path:
    """A cross-encoder that sentence-transformers saved."""
    write(folder / "bare", HEAD, family=family, num_labels=labels)
    CrossEncoder(str(folder / "bare"), device="cpu", **settings).save(str(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize(
    ("family", "labels", "activation"),
    [("bert", 1, None), ("roberta", 3, None), ("roberta", 1, "Tanh"), ("bert", 3, "Softmax"), ("bert", 2, "GELU")],
)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_a_saved_cross_encoder(tmp_path: Path, family: str, labels: int, activation: str | None) -> None:
    settings = {} if activation is None else {"activation_fn": getattr(torch.nn, activation)()}
    folder = saved(tmp_path, labels, family, **settings)
    close(scores(served(folder)), oracle(folder))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(
    "keys",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"},  # versions 2 and 3
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh", "version": "5.1.0"}},
    ],
)
def test_a_cross_encoder_of_an_older_version(tmp_path: Path, labels: int, keys: dict[str, Any]) -> None:
    write(tmp_path, HEAD, num_labels=labels, **keys)
    close(scores(served(tmp_path)), oracle(tmp_path))


def test_both_texts_of_a_long_pair_are_truncated_as_the_tokenizer_does(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    for query, document in ((LONG, TEXTS[0]), (LONG, LONG), (TEXTS[0], LONG), (LONG, "")):
        close(scores(served(folder), [document], query), oracle(folder, [document], query))


def test_prompts_come_before_the_query(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, prompts={"find": "find: ", "answer": "Is it so? "}, default_prompt_name="find")
    task = served(folder)
    close(scores(task), oracle(folder))
    close(scores(task, prompt_name="answer"), oracle(folder, prompt_name="answer"))
    assert not np.allclose(scores(task), scores(task, prompt_name="answer"))
    with pytest.raises(ConchError, match="prompt_name is 'ask'; the checkpoint has answer, find") as error:
        scores(task, prompt_name="ask")
    assert error.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config_sentence_transformers.json", {"activation_fn": "mine.Act"}, "names the activation 'mine.Act'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "its default_prompt_name is 'a', which"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "reads image; a reranker needs text"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"truncation": "only_first"}}},
            "has truncation in processing_kwargs.text",
        ),
    ],
)
def test_a_configuration_that_is_not_served_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path, 1) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConchError, match=message):
        describe_task(Checkpoint.open(path.parent))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["sentence_transformers.models.Pooling"], "is a CrossEncoder with the modules Transformer, Pooling"),
        (["mine.Module"], "is a CrossEncoder with the modules Transformer, Module; a classifier is served with Transf"),
    ],
)
def test_a_module_that_is_not_served_is_refused_by_name(tmp_path: Path, modules: list[str], message: str) -> None:
    path = saved(tmp_path, 1) / "modules.json"
    added = [{"idx": 1, "name": "1", "path": f"1_{kind}", "type": kind} for kind in modules]
    path.write_text(json.dumps([*json.loads(path.read_text()), *added]))
    checkpoint = Checkpoint.open(path.parent)
    assert checkpoint.task == "text-ranking"
    with pytest.raises(ConchError, match=message):
        describe_task(checkpoint)


# Causal language models


@pytest.mark.parametrize(
    ("family", "template"),
    [("qwen3", CHAT), ("qwen3", STRUCTURED), ("qwen3", None), ("llama", CHAT), ("gpt2", None), ("gemma2", CHAT)],
)
def test_a_causal_reranker(tmp_path: Path, family: str, template: str | None) -> None:
    folder = logit_scorer(tmp_path, template, FAMILIES[family])
    task = served(folder)
    close(scores(task), oracle(folder))
    # One pair alone has no prefix that others share, and no neighbours.
    close(scores(task, DOCUMENTS[:1]), oracle(folder, DOCUMENTS[:1]))


@pytest.mark.parametrize("false", [True, False])
def test_a_causal_reranker_with_prompts_and_an_activation(tmp_path: Path, false: bool) -> None:
    prompts = {"web": "Given a web search, find passages.", "code": "Find code."}
    folder = logit_scorer(
        tmp_path, false=false, prompts=prompts, default_prompt_name="web", activation_fn=torch.nn.Tanh()
    )
    task = served(folder)
    close(scores(task), oracle(folder))
    close(scores(task, prompt_name="code"), oracle(folder, prompt_name="code"))


def test_a_truncated_conversation_keeps_its_end(tmp_path: Path) -> None:
    folder = logit_scorer(tmp_path, length=96)
    documents = [LONG, TEXTS[0], LONG * 2]
    close(scores(served(folder), documents), oracle(folder, documents))


def test_variables_of_the_chat_template_are_saved(tmp_path: Path) -> None:
    template = CHAT + "{% if add_generation_prompt %}generated{% endif %}{{ suffix or '' }}"
    variables = {"processing_kwargs": {"chat_template": {"suffix": "!?", "add_generation_prompt": True}}}
    folder = logit_scorer(tmp_path, template, transformer=variables)
    close(scores(served(folder)), oracle(folder))


@pytest.mark.parametrize("template", [CHAT, None])
def test_a_classifier_over_a_decoder(tmp_path: Path, template: str | None) -> None:
    """With a chat template, sentence-transformers makes a conversation of a pair for a classifier too."""
    made = tokenizer(tmp_path / "bare", template)
    config = Qwen3Config(**SIZES, head_dim=8, num_labels=2, vocab_size=len(made), pad_token_id=0, bos_token_id=None)
    torch.manual_seed(3)
    modeling_auto.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "bare")
    CrossEncoder(str(tmp_path / "bare"), device="cpu").save(str(tmp_path / "saved"))
    close(scores(served(tmp_path / "saved")), oracle(tmp_path / "saved"))


def test_a_language_model_without_modules_ranks_by_its_card_and_template(tmp_path: Path) -> None:
    language_model(tmp_path)
    assert Checkpoint.open(tmp_path).task == "text-generation"
    (tmp_path / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n")
    close(scores(served(tmp_path)), oracle(tmp_path))


def test_a_language_model_whose_template_has_no_place_for_a_pair_is_refused(tmp_path: Path) -> None:
    language_model(tmp_path, "{{ messages[0].content }}")
    (tmp_path / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n")
    with pytest.raises(ConchError, match="no place for messages of the roles 'query' and 'document'"):
        served(tmp_path)
    (tmp_path / "pair.jinja").write_text(CHAT)
    assert scores(served(tmp_path, chat_template="pair.jinja")).shape == (len(DOCUMENTS), 1)


QWEN3_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
# The card has the message as the literal of a program, with its quotes escaped.
QWEN3_CARD = f"---\npipeline_tag: text-ranking\n---\nprefix = {json.dumps('<|im_start|>system' + QWEN3_SYSTEM)}\n"


def test_qwen3_reranker_is_known_by_its_card(tmp_path: Path) -> None:
    """The reference is the code on the model card: tokens of three parts, the last logits of yes and no, softmax."""
    made = language_model(
        tmp_path, "{{ messages[0].content }}", Qwen3Config(**{**SIZES, "max_position_embeddings": 1024}), 1024
    )
    (tmp_path / "README.md").write_text(QWEN3_CARD)
    model = modeling_auto.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    instruct = "Given a web search query, retrieve relevant passages that answer the query"
    before = made(f"<|im_start|>system\n{QWEN3_SYSTEM}<|im_end|>\n<|im_start|>user\n")["input_ids"]
    after = made("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")["input_ids"]
    yes, no = made.convert_tokens_to_ids(["yes", "no"])
    expected = []
    for document in TEXTS:
        text = f"<Instruct>: {instruct}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = [*before, *made(text)["input_ids"], *after]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, [no, yes]]
        expected.append([torch.softmax(logits, 0)[1].item()])
    close(scores(served(tmp_path), TEXTS), np.array(expected))


class TestPrefixes:
    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return logit_scorer(tmp_path_factory.mktemp("causal"))

    def test_the_query_is_computed_once_for_all_documents(self, folder: Path) -> None:
        task = served(folder)
        assert isinstance(task, Rerank)
        work, count = ExecutionWork(), 40
        documents = [f"{TEXTS[index % 5]} {index}" for index in range(count)]
        result = answer(task, request("score", text_input=[QUERY] * count, text_pair=documents), work)
        close(np.asarray(result.outputs["score"]), oracle(folder, documents))
        whole, _ = task.pairs.encode([QUERY] * count, documents, "", {})
        common = common_length([tokens.ids for tokens in whole])
        assert common > 15
        prepared = task.prepare(request("score", text_input=[QUERY] * count, text_pair=documents))
        assert prepared.token_counts == [len(tokens.ids) for tokens in whole]
        assert work.tokens == sum(len(tokens.ids) for tokens in whole) - (count - 1) * common

    def test_requests_with_several_queries_share_a_batch(self, folder: Path) -> None:
        task, outcomes = served(folder), []
        requests = [
            request("score", text_input=[TEXTS[0]] * 9 + [TEXTS[2]] * 9, text_pair=DOCUMENTS * 2),
            request("score", text_input=[QUERY] * 9, text_pair=DOCUMENTS),
            request("score", text_input=[QUERY], text_pair=[TEXTS[1]]),
        ]
        outcomes = task.execute([task.prepare(entry) for entry in requests], ExecutionWork())
        results = [outcome.outputs["score"] for outcome in outcomes if isinstance(outcome, Result)]
        close(np.asarray(results[0])[:9], oracle(folder, query=TEXTS[0]))
        close(np.asarray(results[0])[9:], oracle(folder, query=TEXTS[2]))
        close(np.asarray(results[1]), oracle(folder))
        close(np.asarray(results[2]), oracle(folder, [TEXTS[1]]))

    def test_equal_pairs_keep_a_token_each(self, folder: Path) -> None:
        close(scores(served(folder), [TEXTS[3]] * 5), oracle(folder, [TEXTS[3]] * 5))
