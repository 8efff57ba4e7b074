"""The configuration of rerankers: how a pair of texts is read, and how the network's output becomes a score.

Sources: sentence-transformers' ``CrossEncoder`` (``modules.json``, ``config_sentence_transformers.json`` and
``sentence_bert_config.json`` since version 6, keys in ``config.json`` before), and the model card of Qwen3-Reranker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from conch.checkpoints.activations import Activation, activation_named
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import SETTINGS, Prompts
from conch.checkpoints.task import CROSS_ENCODER
from conch.checkpoints.tokenizers.chat import ChatTemplate, read_file
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid, unsupported
from conch.core.text_parameters import TRUNCATION

_SIGMOID: Final = "torch.nn.Sigmoid"
_IDENTITY: Final = "torch.nn.Identity"
#: The tokens whose logits a causal language model without LogitScore compares.
_YES, _NO = "yes", "no"

#: The system message of Qwen3-Reranker, which its model card contains, and the rest of its prompt.
_QWEN3_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_QWEN3_INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_TEMPLATE: Final = (
    "{%- set said = namespace(system='" + _QWEN3_INSTRUCT + "') -%}"
    "{%- for message in messages if message.role == 'system' -%}{%- set said.system = message.content -%}{%- endfor -%}"
    "<|im_start|>system\n" + _QWEN3_SYSTEM + "<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ said.system }}\n"
    "<Query>: {{ (messages | selectattr('role', 'equalto', 'query') | first).content }}\n"
    "<Document>: {{ (messages | selectattr('role', 'equalto', 'document') | first).content }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}"  # jinja removes a newline at the end
)

#: Signs of a chat template that reads the content of a message as a list of parts.
_STRUCTURED: Final = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
#: The value of ``messages`` for a text of a GGUF file with places for the query and the document.
_FORM: Final = "form"
_FORM_KEY: Final = "tokenizer.chat_template.rerank"
_PLACE: Final = re.compile(r"\{(query|document)\}")
#: Keys of ``processing_kwargs`` that do not change the tokens of a text.
_WITHOUT_EFFECT: Final = frozenset(
    {"padding", "padding_side", "pad_to_multiple_of", "return_tensors", "logits_to_keep"}
)


@dataclass(slots=True)
class RankingPlan:
    """The method by which a checkpoint scores pairs, as far as its configuration shows; reads no weights.

    ``causal`` is true for a causal language model, whose score is the logit of ``true_id`` minus that of ``false_id``
    (None: only the first) after a pair. ``messages`` is the format of chat messages, ``flat`` or ``structured``, if a
    chat template makes a text of a pair, and ``form`` if a GGUF file has such a text with places for both; empty if the
    tokenizer joins the two texts. ``variables`` are passed to the
    template. ``max_length`` limits tokens in addition to the checkpoint's limit (0: no further limit).
    """

    activation: Activation
    prompts: Prompts = field(default_factory=Prompts)
    causal: bool = False
    true_id: int | None = None
    false_id: int | None = None
    messages: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    max_length: int = 0

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> RankingPlan:
        """Read the plan of a checkpoint. Raises INVALID_ARG or UNSUPPORTED, naming the module or the setting."""
        settings = checkpoint.json(SETTINGS) or {}
        saved = settings if settings.get("model_type") == CROSS_ENCODER and checkpoint.modules() else {}
        causal = is_causal(checkpoint.config)
        classes = 1 if causal else len(checkpoint.labels or ()) or 1
        plan = cls(activation_named(_activation(checkpoint.config, saved, classes), checkpoint.source), causal=causal)
        plan.prompts = Prompts(saved.get("prompts") or {}, saved.get("default_prompt_name") or "")
        if plan.prompts.default and plan.prompts.default not in plan.prompts.by_name:
            raise invalid(
                f"'{checkpoint.source}': its default_prompt_name is '{plan.prompts.default}', which 'prompts' does "
                "not contain"
            )
        if checkpoint.gguf is not None:
            plan.messages = _FORM if checkpoint.gguf.text(_FORM_KEY) else ""
        elif saved:
            plan._read_modules(checkpoint)
        return plan

    def _read_modules(self, checkpoint: Checkpoint) -> None:
        modules = checkpoint.modules()
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        expected = ["Transformer", "LogitScore"] if self.causal else ["Transformer"]
        if kinds != expected:
            raise unsupported(
                f"'{checkpoint.source}' is a CrossEncoder with the modules {', '.join(kinds)}; a "
                f"{'causal language model' if self.causal else 'classifier'} is served with {' and '.join(expected)}"
            )
        for module, kind in zip(modules, kinds, strict=True):
            if not str(module.get("type", "")).startswith("sentence_transformers."):
                raise unsupported(
                    f"'{checkpoint.source}' has the module '{module['type']}', which is not part of "
                    "sentence-transformers; conch does not run code of modules"
                )
            if kind == "Transformer" and module.get("path"):
                raise unsupported(
                    f"'{checkpoint.source}' has its Transformer in '{module['path']}'; it must be the checkpoint itself"
                )
        self._read_transformer(checkpoint)
        if self.causal:
            self._read_logit_score(checkpoint, str(modules[1].get("path", "")))

    def _read_transformer(self, checkpoint: Checkpoint) -> None:
        """Read the inputs of the Transformer module; folders of older versions always join the two texts."""
        config = checkpoint.transformer_config()
        inputs = config.get("modality_config") or {"text": {}}
        if "message" in inputs:
            self.messages = str(inputs["message"].get("format") or "auto")
        elif "text" not in inputs:
            raise unsupported(f"'{checkpoint.source}' reads {', '.join(inputs)}; a reranker needs text")
        for group, values in (config.get("processing_kwargs") or {}).items():
            if group == "chat_template":
                self.variables = {name: value for name, value in values.items() if name != "restore_suffix"}
                if not values.get("restore_suffix", True) or "chat_template" in values:
                    raise unsupported(_processing(checkpoint, group, "restore_suffix or chat_template"))
            if group in ("text", "common"):
                self._read_processing(checkpoint, group, values)

    def _read_processing(self, checkpoint: Checkpoint, group: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name == "max_length" and type(value) is int and value > 0:
                self.max_length = value
            elif name not in _WITHOUT_EFFECT and (name, value) not in (
                ("truncation", True),
                ("truncation", "longest_first"),
            ):
                raise unsupported(_processing(checkpoint, group, name))

    def _read_logit_score(self, checkpoint: Checkpoint, path: str) -> None:
        config = checkpoint.json(f"{path}/config.json")
        if config is None:
            raise invalid(f"'{checkpoint.source}' lacks {path}/config.json, which modules.json names")
        self.true_id, self.false_id = config.get("true_token_id"), config.get("false_token_id")
        if type(self.true_id) is not int or not (self.false_id is None or type(self.false_id) is int):
            raise invalid(
                f"'{checkpoint.source}': true_token_id and false_token_id in {path}/config.json must be token ids"
            )


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether the network of a configuration is a causal language model."""
    return any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in config.get("architectures") or ())


def _processing(checkpoint: Checkpoint, group: str, name: str) -> str:
    return f"'{checkpoint.source}' has {name} in processing_kwargs.{group}, which is not supported"


def _activation(config: Mapping[str, Any], saved: Mapping[str, Any], classes: int) -> str:
    """Return the saved activation, else sigmoid for one class and none for several."""
    older = config.get("sentence_transformers")
    name = (
        saved.get("activation_fn")
        or (older.get("activation_fn") if isinstance(older, Mapping) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    return str(name) if name else _SIGMOID if classes == 1 else _IDENTITY


class PairEncoder:
    """Encodes queries and documents as the token sequences of a plan, with ``encoder``."""

    def __init__(self, plan: RankingPlan, checkpoint: Checkpoint, encoder: InputEncoder) -> None:
        self._plan = plan
        self._encoder = encoder
        self._template = encoder.tokenizer.template
        if path := checkpoint.options.text("chat_template"):
            named = read_file(checkpoint.named_path("chat_template", path))
            self._template = replace(self._template, templates=named, _compiled={})
        self._messages = plan.messages
        self._form = ""
        if plan.causal and plan.true_id is None:
            self._choose_template(checkpoint)
        if self._messages == "auto":
            self._messages = _format_of(self._template)
        if self._messages == _FORM and checkpoint.gguf is not None:
            self._form = checkpoint.gguf.text(_FORM_KEY)
        elif self._messages:
            self._require_roles(checkpoint.source)
        else:
            encoder.room(pair=True)
        self._endings: dict[str, list[int]] = {}

    def encode(
        self, queries: Sequence[str], documents: Sequence[str], prompt: str, parameters: Mapping[str, Any]
    ) -> tuple[list[Any], int]:
        """Encode each pair; returns the tokens and the number of pairs that were truncated.

        Without messages, the prompt is put before each query; otherwise it is the system message. ``parameters`` are
        those of the request, for truncation. Raises UNSUPPORTED for messages that would lose their beginning.
        """
        encoder = self._encoder.requested(parameters)
        if not self._messages:
            return encoder.encode([prompt + query for query in queries] if prompt else queries, documents)
        if parameters.get(TRUNCATION) == "left":
            raise unsupported("this model reads a chat template, and cannot truncate texts on the left")
        texts = [self._render(query, document, prompt) for query, document in zip(queries, documents, strict=True)]
        return encoder.encode_rendered(texts, self._ending(prompt))

    def _render(self, query: str, document: str, prompt: str = "") -> str:
        if self._form:
            texts = {"query": query, "document": document}
            return _PLACE.sub(lambda place: texts[place[1]], self._form)
        roles = {"system": prompt} if prompt else {}
        messages = [
            {"role": role, "content": text if self._messages == "flat" else [{"type": "text", "text": text}]}
            for role, text in (roles | {"query": query, "document": document}).items()
        ]
        return self._template.render(messages, **{"add_generation_prompt": False, **self._plan.variables})

    def _ending(self, prompt: str) -> list[int]:
        """Return the tokens after the texts, which a truncated pair keeps: the common end of two unlike pairs."""
        if prompt not in self._endings:
            first, second = (
                self._encoder.tokenizer.encode(self._render(text, text, prompt), special_tokens=False)
                for text in ("0", "1 2 3 4")
            )
            count = 0
            while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
                count += 1
            self._endings[prompt] = first[len(first) - count :] if count < min(len(first), len(second)) else []
        return self._endings[prompt]

    def _choose_template(self, checkpoint: Checkpoint) -> None:
        """Choose the chat template and the score of a causal language model without modules."""
        tokenizer = self._encoder.tokenizer
        self._messages = _format_of(self._template) if self._template else "flat"
        if not self._template or self._roles_problem():
            card = checkpoint.path("README.md")
            if card is None or _QWEN3_SYSTEM not in card.read_text("utf-8", "replace").replace('\\"', '"'):
                raise unsupported(
                    f"'{checkpoint.source}' is a causal language model for {checkpoint.task} without the modules of "
                    "sentence-transformers, and its chat template has no place for messages of the roles 'query' and "
                    "'document': set parameter 'chat_template' to a template that has, or task to text-generation"
                )
            self._template = ChatTemplate({"default": _QWEN3_TEMPLATE}, {}, checkpoint.source)
            self._messages = "flat"
        self._plan.true_id, self._plan.false_id = (_token_id(tokenizer, word, checkpoint) for word in (_YES, _NO))

    def _require_roles(self, source: str) -> None:
        problem = self._roles_problem() if self._template else "it has none"
        if problem:
            raise unsupported(
                f"the chat template of '{source}' cannot make a text of a query and a document: {problem}"
            )

    def _roles_problem(self) -> str:
        """Return why the chat template does not render both roles, or an empty text."""
        try:
            base, other_query, other_document = (
                self._render(*pair) for pair in (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
            )
        except ConchError as error:
            return error.message
        lost = [role for role, text in (("query", other_query), ("document", other_document)) if text == base]
        return f"it ignores messages of the role {' and '.join(lost)}" if lost else ""


def _format_of(template: ChatTemplate) -> str:
    """Return the format of messages that a template reads, by signs in its text."""
    text = template.templates.get("default", "")
    return "structured" if not text or any(sign in text for sign in _STRUCTURED) else "flat"


def _token_id(tokenizer: TextTokenizer, word: str, checkpoint: Checkpoint) -> int:
    id = tokenizer.fast.token_to_id(word) if tokenizer.fast is not None else None
    if id is None:
        raise unsupported(f"'{checkpoint.source}' has no token '{word}', whose logit is the score of a pair")
    return int(id)
