"""Follows Whisper's ``generate`` from window to window: its final text, its scores, and cancelled requests.

transformers transcribes a recording window by window, and returns when the last one has ended. ``watch`` extends a
model so that a ``WindowFollower`` gets the result of each window as it ends. The scores are those of openai-whisper
(``DecodingResult`` and ``whisper.utils.compression_ratio``).
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

#: Feature frames in a second.
FRAMES_PER_SECOND: Final = 100

_local = threading.local()


@dataclass(frozen=True, slots=True)
class WindowScores:
    """The scores of the segments of a window, by OpenAI's names.

    ``seek`` is the start of the window (feature frames). ``avg_logprob`` is the mean log-probability of its tokens and
    of their end, ``no_speech_prob`` the probability of silence at its beginning, ``compression_ratio`` the size of its
    text over that of the compressed text (UTF-8, zlib).
    """

    seek: int
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(slots=True)
class WindowFollower:
    """Follows one call of ``generate`` for one recording, in the thread that makes it.

    ``on_text`` is called after each window with the text that later windows cannot change. With ``scored``, the call
    must have ``output_scores`` and ``return_dict_in_generate``.
    """

    pipeline: Any
    scored: bool = False
    on_text: Callable[[str], None] | None = None
    #: For each window, the number of chunks that had ended with it, and its scores.
    windows: list[tuple[int, WindowScores]] = field(default_factory=list)
    #: The texts of the first chunks, whose tokens are no longer in ``_tokens``.
    _texts: list[str] = field(default_factory=list)
    _tokens: list[Any] = field(default_factory=list)
    _no_speech: float = 0.0
    _attempt: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the calls of ``generate`` in this context."""
        _local.follower = self
        try:
            yield
        finally:
            _local.follower = None

    def scores_of(self, count: int) -> list[WindowScores]:
        """Return the scores of ``count`` chunks; those after the last complete chunk belong to the last window."""
        ends = [end for end, _ in self.windows[:-1]]
        return [self.windows[sum(end <= index for end in ends)][1] for index in range(count)] if self.windows else []

    def note_logits(self, ids: Any, logits: Any) -> None:
        """Store the probability of silence, which the logits after the token that starts a transcript have."""
        config = self.pipeline.model.generation_config
        places = (ids[0] == config.decoder_start_token_id).nonzero().flatten().tolist()
        if places:
            token = config.no_timestamps_token_id - 1
            self._no_speech = float(logits[0, places[-1]].float().softmax(-1)[token])

    def note_attempt(self, sequence: Any, scores: Sequence[Any], temperature: float) -> None:
        """Store the scores of a window's tokens; a window may have several attempts at different temperatures.

        ``scores`` FP32 ``[vocabulary]`` are the processed logits of each token, divided by ``temperature`` unless that
        is 0.
        """
        logits = torch.stack(list(scores))[: len(sequence)].float() * (temperature or 1.0)
        tokens = sequence[-len(logits) :].to(logits.device)
        total = float(torch.log_softmax(logits, -1).gather(-1, tokens[:, None]).sum())
        ended = int(sequence[-1]) == self.pipeline.tokenizer.eos_token_id
        text = self.pipeline.tokenizer.decode(sequence.cpu(), skip_special_tokens=True).strip().encode()
        self._attempt = (
            round(temperature, 6),  # of an FP32 input
            total / (len(sequence) - ended + 1),
            len(text) / len(zlib.compress(text)),
        )

    def note_segments(self, segments: Sequence[dict[str, Any]], seconds: float) -> None:
        """Add the segments of a window that starts at ``seconds``."""
        self._tokens += [segment["tokens"].cpu() for segment in segments]
        output = self.pipeline.postprocess([{"tokens": torch.cat(self._tokens)[None]}], return_timestamps=True)
        # A chunk without an end continues in the next window.
        ended = [chunk["text"] for chunk in output["chunks"] if chunk["timestamp"][1] is not None]
        texts = [*self._texts, *ended]
        if len(ended) == len(output["chunks"]):
            self._texts, self._tokens = texts, []
        if self.on_text is not None:
            self.on_text("".join(texts))
        if self.scored:
            for segment in segments:
                segment["result"].pop("scores", None)  # generate would keep those of all windows
            scores = WindowScores(round(FRAMES_PER_SECOND * seconds), *self._attempt, self._no_speech)
            self.windows.append((len(texts), scores))


def watch(model: Any) -> None:
    """Extend a Whisper model: its ``generate`` reports to the follower of its thread, if there is one."""
    need_fallback, retrieve_segment = model._need_fallback, model._retrieve_segment
    names = inspect.signature(need_fallback)

    def after_attempt(*arguments: Any, **keywords: Any) -> Any:
        follower = _follower()
        if follower is not None and follower.scored:
            given = names.bind(*arguments, **keywords).arguments
            sampled = given["generation_config"].do_sample
            outputs = given["seek_outputs"][given["index"]]
            follower.note_attempt(given["seek_sequence"], outputs["scores"], given["temperature"] if sampled else 0.0)
        return need_fallback(*arguments, **keywords)

    def after_window(*arguments: Any, **keywords: Any) -> Any:
        segments, offset = retrieve_segment(*arguments, **keywords)
        follower = _follower()
        if follower is not None:
            follower.note_segments(segments, float(keywords["time_offset"][keywords["prev_idx"]]))
        return segments, offset

    def after_forward(_: Any, arguments: Any, keywords: Mapping[str, Any], output: Any) -> None:
        follower = _follower()
        if follower is not None and follower.scored and keywords.get("decoder_input_ids") is not None:
            follower.note_logits(keywords["decoder_input_ids"], output.logits)

    model._need_fallback, model._retrieve_segment = after_attempt, after_window
    model.register_forward_hook(after_forward, with_kwargs=True)


def _follower() -> WindowFollower | None:
    follower: WindowFollower | None = getattr(_local, "follower", None)
    return follower
