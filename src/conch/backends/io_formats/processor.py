"""Reads the images and recordings of prompts, with the processor of a checkpoint or for an engine that prepares them.

The threads that read requests decode files and call the processor, for each item alone: its result is kept by content.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from threading import Lock
from typing import Any, Final

from conch.backends.base.arrays import Request
from conch.backends.generation.media import CACHE_BYTES, MediaItem, MediaPreparer, MediaSpec
from conch.backends.tasks import media
from conch.backends.tasks.transformers import loading
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.chat import ChatTemplate, check_messages
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid, one_line, unsupported
from conch.core.inference import TensorSpec
from conch.machine import extras

Message = dict[str, Any]

#: The inputs for the files of a prompt, by kind.
MEDIA_INPUTS: Final = tuple(TensorSpec(kind, "BYTES", (-1,), optional=True) for kind in ("image", "audio"))
#: The default of parameter ``max_media``.
MAX_MEDIA: Final = 32
#: The longest recording of a prompt (s) unless parameter ``max_audio_seconds`` sets it.
_SECONDS: Final = 600
#: The arguments of processors by kind.
_ARGUMENTS: Final = {"image": "images", "audio": "audio"}
#: The size of the digest of a file (bytes).
_DIGEST: Final = 32
#: The part of processors that reads videos, and the packages that only videos need.
_VIDEOS: Final = "video_processor"
_VIDEO_PACKAGES: Final = ("num2words",)
#: The argument, and the output, for the texts that take the place of placeholders.
_REPLACED: Final = "text_replacement_offsets"


class MediaProcessor:
    """The processor of a checkpoint. Raises INVALID_ARG or UNSUPPORTED if it cannot be used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.processor = _load(checkpoint)
        names = {"image": "image_processor", "audio": "feature_extractor"}
        #: The text of a placeholder by kind.
        self.marks = {
            kind: mark
            for kind, name in names.items()
            if hasattr(self.processor, name) and (mark := getattr(self.processor, f"{kind}_token", None)) is not None
        }
        if len(self.marks) > 1:
            # Checkpoints of a family differ in what they read, and have the same processor.
            self.marks = {kind: mark for kind, mark in self.marks.items() if kind in checkpoint.media_extras}
        taken = inspect.signature(type(self.processor).__call__).parameters
        if lost := [kind for kind in self.marks if _ARGUMENTS[kind] not in taken]:
            raise invalid(f"{type(self.processor).__name__} does not process '{lost[0]}' beside a text")
        if not self.marks or not hasattr(self.processor, "get_text_with_replacements"):
            raise invalid(f"{type(self.processor).__name__} has no placeholders for images or sound")
        if "image" in self.marks:
            media.require_images(checkpoint.task)
        if "audio" in self.marks:
            extras.require("prompts with sound", "soundfile", "scipy.signal")
            self._rate = int(self.processor.feature_extractor.sampling_rate)
        #: Whether the tokens of a prompt that is not a conversation begin with a special token.
        self.special_tokens = getattr(self.processor.tokenizer, "add_bos_token", True) is not False
        self._open_cache(checkpoint.options)
        self.spec = self._spec(checkpoint)

    def _open_cache(self, options: Options) -> None:
        """Read the limits of items, and create the cache for them."""
        self._pixels = media.max_pixels(options)
        self._seconds = options.positive("max_audio_seconds", _SECONDS)
        self._most = options.positive("max_media", MAX_MEDIA)
        self._cache_bytes = options.positive("media_cache_bytes", CACHE_BYTES)
        self._items: OrderedDict[bytes, MediaItem] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        #: Whether the template renders parts, by role.
        self._parts: dict[str, bool] = {}

    def items(self, request: Request) -> list[MediaItem]:
        """Return the items of a request; empty if none.

        Raises INVALID_ARG for files that cannot be read, or are too many or too large.
        """
        files = {kind: request.files(kind) for kind in self.marks if request.has(kind)}
        count = sum(map(len, files.values()))
        if count > self._most:
            raise invalid(
                f"the request has {count} images and recordings; at most {self._most} are read (parameter 'max_media')",
                next(iter(files)),
            )
        return [item for kind, data in files.items() for item in self._read(kind, data)]

    def check_parts(self, messages: Any, given: Collection[str]) -> None:
        """Raise INVALID_ARG for invalid messages, and for a part whose kind, such as ``image``, is not in ``given``."""
        check_messages(messages)
        for kind in self.marks.keys() - given:
            if any(self._has_items(message, (kind,)) for message in messages):
                raise invalid(f"the messages have a part of the type '{kind}', but the request has no '{kind}'", kind)

    def with_parts(self, messages: list[Message], template: ChatTemplate) -> list[Message]:
        """Return messages with contents as ``template`` reads them: lists of parts, or texts with placeholders.

        Images and recordings in results of tools become messages of the user if the template leaves them out.
        """
        if any(message["role"] == "tool" and self._has_items(message, self.marks) for message in messages):
            messages = messages if self._reads_parts(template, "tool") else self._moved(messages)
        return [self._with_parts(message, template) for message in messages]

    def _moved(self, messages: list[Message]) -> list[Message]:
        """Return messages with the items of results of tools in a message of the user after them."""
        moved: list[Message] = []
        items: list[Any] = []
        for message in messages:
            is_result = message["role"] == "tool"
            if items and not is_result:
                moved.append({"role": "user", "content": items})
                items = []
            if is_result and self._has_items(message, self.marks):
                parts = message["content"]
                items = items + [part for part in parts if part.get("type") in self.marks]
                texts = [str(part.get("text", "")) for part in parts if part.get("type") not in self.marks]
                message = {**message, "content": "\n".join(texts)}
            moved.append(message)
        return [*moved, {"role": "user", "content": items}] if items else moved

    def _has_items(self, message: Message, kinds: Collection[str]) -> bool:
        content = message.get("content")
        return isinstance(content, list) and any(part.get("type") in kinds for part in content)

    def _with_parts(self, message: Message, template: ChatTemplate) -> Message:
        content = message.get("content")
        if isinstance(content, str) and self._reads_parts(template, "user"):
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self._reads_parts(template, "user"):
            texts = (self.marks.get(part.get("type", ""), str(part.get("text", ""))) for part in content)
            return {**message, "content": "\n".join(texts)}
        return message

    def _reads_parts(self, template: ChatTemplate, role: str) -> bool:
        """Whether a template renders the parts of the content of a message, and not the list itself."""
        if role not in self._parts:
            self._parts[role] = self._reads(template, role)
        return self._parts[role]

    def _reads(self, template: ChatTemplate, role: str) -> bool:
        """Whether a template renders the parts of a message with this role."""
        parts = [{"type": kind} for kind in self.marks] + [{"type": "text", "text": "conch"}]
        message: dict[str, Any] = {"role": role, "content": parts}
        messages = [message]
        if role == "tool":
            call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
            question = {"role": "user", "content": parts[-1:]}
            messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}, message]
        try:
            text = template.render(messages)
        except ConchError:
            text = ""
        return "conch" in text and "'type'" not in text and all(mark in text for mark in self.marks.values())

    def expand(self, text: str, items: Sequence[MediaItem]) -> str:
        """Replace the placeholders in a prompt. Raises INVALID_ARG unless it has one for each item."""
        self.check_marks(text, items)
        if not items:
            return text
        replacements = {kind: [item.replacement for item in items if item.kind == kind] for kind in self.marks}
        images = [media.example_image()] * len(replacements.get("image", []))
        # Some processors put further tokens around the text of a prompt with images.
        _, texts, *_ = self.processor.prepare_inputs_layout(images=images or None, text=[text])
        texts, _ = self.processor.get_text_with_replacements(
            texts, replacements.get("image", []), [], replacements.get("audio", [])
        )
        return str(texts[0])

    def check_marks(self, text: str, items: Sequence[MediaItem]) -> None:
        """Raise INVALID_ARG unless a prompt has a placeholder for each item; without items it may have any."""
        for kind, mark in self.marks.items():
            given, placed = sum(item.kind == kind for item in items), text.count(mark)
            if given != placed and items:
                raise invalid(f"the prompt has {placed} times '{mark}', and the request {given} of '{kind}'", kind)

    def encode(
        self, text: str, items: Sequence[MediaItem], tokenizer: TextTokenizer, *, special_tokens: bool
    ) -> list[int]:
        """Return the token ids of a prompt with its items. Raises INVALID_ARG unless it has a place for each."""
        expanded = self.expand(text, items)
        prompt = tokenizer.encode(expanded, special_tokens=special_tokens and self.special_tokens)
        self.check(prompt, items)
        return prompt

    def check(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> None:
        """Raise INVALID_ARG unless a prompt (token ids) has the placeholders of its items."""
        for kind, placeholder in self.spec.placeholders.items():
            needed = sum(item.tokens for item in items if item.kind == kind)
            if (placed := list(prompt).count(placeholder)) != needed:
                raise invalid(f"the prompt has {placed} placeholders of '{kind}', but the request needs {needed}", kind)

    def _read(self, kind: str, files: Sequence[bytes]) -> list[MediaItem]:
        digests = [hashlib.blake2b(kind.encode() + data, digest_size=_DIGEST).digest() for data in files]
        with self._lock:
            items = {digest: self._items[digest] for digest in digests if digest in self._items}
        pixels = seconds = 0.0
        for row, (digest, data) in enumerate(zip(digests, files, strict=True)):
            if digest in items:
                continue
            if kind == "image":
                picture = media.image(data, pixels=self._pixels, row=row)
                pixels += picture.width * picture.height
                if pixels > media.TOGETHER * self._pixels:
                    raise invalid(
                        f"the images of the request have more than {media.TOGETHER * self._pixels} pixels together",
                        kind,
                    )
                items[digest] = self._item(kind, digest, picture)
            else:
                sound = media.audio(data, self._rate, seconds=self._seconds, row=row)
                seconds += len(sound) / self._rate
                if seconds > media.TOGETHER * self._seconds:
                    raise invalid(
                        f"the recordings of the request are longer than {media.TOGETHER * self._seconds} seconds "
                        "together",
                        kind,
                    )
                items[digest] = self._item(kind, digest, sound)
        with self._lock:
            for digest in digests:
                if digest not in self._items:
                    self._items[digest] = items[digest]
                    self._bytes += items[digest].size
                self._items.move_to_end(digest)
            while self._bytes > self._cache_bytes and self._items:
                _, dropped = self._items.popitem(last=False)
                self._bytes -= dropped.size
        return [items[digest] for digest in digests]

    def _item(self, kind: str, digest: bytes, content: Any) -> MediaItem:
        """Process an item alone. Raises INVALID_ARG if the processor refuses it."""
        try:
            arrays = dict(self._process(self.marks[kind], {kind: [content]}))
        except ConchError:
            raise
        except Exception as error:  # processors raise errors of many types
            raise invalid(f"input '{kind}' cannot be processed for the model: {one_line(error)}", kind) from error
        [[offsets]] = arrays.pop(_REPLACED)
        ids = arrays["input_ids"][0].tolist()
        tokens = ids.count(self._placeholder(kind))
        return MediaItem(kind, digest, arrays, str(offsets["replacement"]), tokens)

    def _process(self, text: str, contents: Mapping[str, Sequence[Any]]) -> Any:
        arguments: dict[str, Any] = {_ARGUMENTS[kind]: list(values) for kind, values in contents.items()}
        if "audio" in contents:
            arguments["sampling_rate"] = self._rate
        return self.processor(
            text=[text], return_tensors="pt", **{f"return_{_REPLACED}": True}, add_special_tokens=False, **arguments
        )

    def _placeholder(self, kind: str) -> int:
        config_id = getattr(self.processor, f"{kind}_token_id", None)
        return int(self._placeholders.get(kind, config_id or 0))

    def _spec(self, checkpoint: Checkpoint) -> MediaSpec:
        """Process an example of each kind, twice in a prompt."""
        names = {kind: (f"{kind}_token_id", f"{kind}_token_index") for kind in self.marks}
        config = checkpoint.config
        self._placeholders = {
            kind: next(int(config[name]) for name in names[kind] if name in config) for kind in self.marks
        }
        with loading(checkpoint, "processor"):
            contents: dict[str, list[Any]] = {}
            if "image" in self.marks:
                picture = media.example_image()
                contents["image"] = [picture, picture.transpose(4)]
            if "audio" in self.marks:
                sound = media.example_sound(self._rate, 1)
                contents["audio"] = [sound, sound[: len(sound) // 2]]
            kinds = [(kind, content) for kind, values in contents.items() for content in values]
            items = [
                self._item(kind, bytes([number] * _DIGEST), content) for number, (kind, content) in enumerate(kinds)
            ]
            text = "".join(f"A {mark} and {mark} are here. " for mark in self.marks.values())
            arrays = dict(self._process(text, contents))
        arrays.pop(_REPLACED)
        return MediaSpec(self._placeholders, (arrays["input_ids"][0].tolist(), items), arrays, self._cache_bytes)


def _load(checkpoint: Checkpoint) -> Any:
    """Load the processor on Pillow and numpy, without its part for videos."""
    with loading(checkpoint, "processor"):
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        settings = checkpoint.json("processor_config.json") or {}
        name = settings.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(str(checkpoint.config.get("model_type")))
        return without_videos(str(name)).from_pretrained(
            checkpoint.directory,
            backend="pil",
            local_files_only=True,
            trust_remote_code=checkpoint.options.trust_remote_code,
        )


def without_videos(name: str) -> Any:
    """Return a class of processors of transformers, without its part for videos and the packages which that needs.

    Raises INVALID_ARG if transformers has no such class.
    """
    from transformers.processing_utils import ProcessorMixin

    known = _processor_class(name)
    every = known.get_attributes()
    module = sys.modules[known.__module__]
    for package in _VIDEO_PACKAGES:
        if getattr(module, package, module) is None:
            setattr(module, package, _refuse_videos)

    class Parts(ProcessorMixin):
        """The last base, which takes the parts that the constructor of ``known`` passes on."""

        def __init__(self, *parts: Any, **named: Any) -> None:
            super().__init__(
                *(part for part in parts if part is not None),
                **{name: part for name, part in named.items() if part is not None},
            )

    class Processor(known, Parts):  # type: ignore[valid-type, misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [part for part in every if part != _VIDEOS]

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], processor_dict: dict[str, Any], **named: Any) -> Any:
            parts = dict(zip(cls.get_attributes(), args, strict=True))
            return super().from_args_and_dict([parts.get(name) for name in every], processor_dict, **named)

    Processor.__name__ = name
    return Processor


def _refuse_videos(*_: Any) -> Any:
    raise unsupported("videos are not read")


def _processor_class(name: str) -> Any:
    """Return a class of processors, even if transformers has it only with torchvision."""
    import transformers

    known = getattr(transformers, name, None)
    if known is None:
        raise invalid(f"transformers has no processor '{name}'")
    if "torchvision" not in vars(known).get("_backends", ()):
        return known
    # The module needs a function of the image processor, which the one on Pillow has too.
    family = name.removesuffix("Processor").lower()
    folder = f"transformers.models.{family}"
    images, pillow, processing = (
        f"{folder}.{kind}_{family}" for kind in ("image_processing", "image_processing_pil", "processing")
    )
    sys.modules[images] = import_module(pillow)
    try:
        return getattr(import_module(processing), name)
    finally:
        del sys.modules[images]


class PreparedMedia(MediaProcessor):
    """The images and recordings that ``preparer`` prepares, the media preparer of an engine such as ``llamacpp``.

    Raises UNSUPPORTED if a library to read them is missing. As in llama.cpp, templates get placeholders as text, and
    the texts between them are tokenized separately.
    """

    def __init__(self, checkpoint: Checkpoint, preparer: MediaPreparer) -> None:
        self.marks = dict(preparer.marks)
        if "image" in self.marks:
            media.require_images(checkpoint.task)
        if "audio" in self.marks:
            extras.require("prompts with sound", "soundfile", "scipy.signal")
        self._rate = preparer.sample_rate
        self._preparer = preparer
        self._mark = re.compile("|".join(map(re.escape, self.marks.values())))
        self._kinds = {mark: kind for kind, mark in self.marks.items()}
        self._open_cache(checkpoint.options)

    def with_parts(self, messages: list[Any], template: ChatTemplate) -> list[Any]:
        return [self._with_text(message, template) for message in messages]

    def _with_text(self, message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
        """Return a message with its content as a text, or as a part with a text if the template reads only parts."""
        content = message.get("content")
        text = self._text(content) if isinstance(content, list) else content
        if isinstance(text, str) and self._reads_parts(template, "user"):
            return {**message, "content": [{"type": "text", "text": text}]}
        return {**message, "content": text} if isinstance(content, list) else message

    def _text(self, parts: list[Any]) -> str:
        """Return the texts of parts in lines of their own, and placeholders where they are, as llama.cpp does."""
        text, after_text = "", False
        for part in parts:
            mark = self.marks.get(part.get("type"))
            if mark is None and after_text:
                text += "\n"
            text += mark or str(part.get("text", ""))
            after_text = mark is None
        return text

    def _reads(self, template: ChatTemplate, role: str) -> bool:
        """Whether a template does not render a content that is a text."""
        try:
            return "conch" not in template.render([{"role": role, "content": "conch"}])
        except ConchError:
            return True

    def encode(
        self, text: str, items: Sequence[MediaItem], tokenizer: TextTokenizer, *, special_tokens: bool
    ) -> list[int]:
        self.check_marks(text, items)
        waiting = {kind: [item for item in items if item.kind == kind] for kind in self.marks}
        tokens: list[int] = []
        start = 0
        for match in self._mark.finditer(text):
            tokens += tokenizer.encode(text[start : match.start()], special_tokens=special_tokens and start == 0)
            tokens += waiting[self._kinds[match[0]]].pop(0).arrays["tokens"].tolist()
            start = match.end()
        return tokens + tokenizer.encode(text[start:], special_tokens=False)

    def expand(self, text: str, items: Sequence[MediaItem]) -> str:
        if items:
            raise unsupported("images and recordings have no tokens of text with this model")
        return text

    def check(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> None:
        if items:
            raise invalid("images and recordings have no token ids with this model: send the prompt as text", "image")

    def _item(self, kind: str, digest: bytes, content: Any) -> MediaItem:
        return self._preparer.prepare(kind, digest, content)
