"""Reads the images and recordings of prompts for an engine that prepares them itself, such as ``llamacpp``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from conch.backends.generation.media import MediaItem, MediaPreparer
from conch.backends.io_formats.processor import MediaProcessor
from conch.backends.tasks import media
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, invalid, unsupported
from conch.machine import extras


class PreparedMedia(MediaProcessor):
    """The images and recordings that ``preparer`` prepares. Raises UNSUPPORTED if a library to read them is missing.

    As in llama.cpp, templates get placeholders as text, and the texts between them are tokenized separately.
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
