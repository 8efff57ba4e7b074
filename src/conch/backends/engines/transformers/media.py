"""The features of images and recordings in prompts: computes, keeps and passes them to a network.

A network of transformers puts features in the place of the embeddings of placeholder tokens, and calls its decoder with
the result. A run of the network for a single item is therefore ended at that call, whose arguments have the features.
They are kept by content. A prompt is read in chunks like any other; a hook of the decoder inserts the features again.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from conch.backends.generation.media import MediaItem, MediaSpec

Tensor = Any

#: The arguments of decoders for features of several layers, as in Qwen3-VL: where they are, and the features.
_PLACES, _DEEP = "visual_pos_masks", "deepstack_visual_embeds"
#: The kinds of tokens: some networks read them to place items, others to let tokens see later ones.
_KINDS, _TYPES = "mm_token_type_ids", "token_type_ids"
#: Outputs of processors that are not inputs for generation.
_UNUSED: Final = ("labels", "text_replacement_offsets")
#: The numbers of kinds in ``mm_token_type_ids``.
_NUMBERS: Final = {"image": 1, "audio": 3}


@dataclass(slots=True, eq=False)
class MediaFeatures:
    """MediaFeatures of an item: embeddings ``[tokens, size]``, and those for the first layers of the decoder.

    ``types`` are the types of the tokens of texts and of placeholders, None unless they let tokens see later ones.
    """

    embeddings: Tensor
    deep: list[Tensor]
    types: tuple[int, int] | None

    @property
    def size(self) -> int:
        return sum(int(tensor.nbytes) for tensor in (self.embeddings, *self.deep))


@dataclass(slots=True, eq=False)
class PromptMedia:
    """The items of a prompt.

    ``places`` are the positions of all placeholders in ascending order, ``keys`` the numbers that represent them in the
    keys of prefixes. The rest is computed before the prompt is read: ``embeddings`` ``[places, size]`` and ``deep`` for
    the places, ``positions`` ``[3, 1, prompt]`` of a network with such positions, and ``types`` ``[1, prompt]`` of one
    that reads the prompt at once. ``offset`` is added to the positions of later tokens.
    """

    items: Sequence[MediaItem]
    prompt: list[int]
    places: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    ready: bool = False
    embeddings: Tensor = None
    deep: list[Tensor] = field(default_factory=list)
    positions: Tensor = None
    offset: int = 0
    types: Tensor = None

    @property
    def whole(self) -> bool:
        """Whether tokens of the prompt see later ones, so that it must be read at once."""
        return self.types is not None

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """Return ``tokens``, which begin with the prompt, with the placeholders replaced by their keys."""
        keyed = list(tokens)
        for place, key in zip(self.places, self.keys, strict=True):
            keyed[place] = key
        return keyed


def network_inputs(model: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return outputs of a processor as inputs of ``model`` on its device, in its type of numbers."""
    converted = {}
    for name, array in arrays.items():
        if name not in _UNUSED:
            tensor = torch.as_tensor(array).to(model.device) if hasattr(array, "shape") else array
            is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            converted[name] = tensor.to(model.dtype) if is_float else tensor
    return converted


class _Captured(Exception):
    """Ends a run of the network at the call of its decoder."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class MediaNetwork:
    """Computes features with ``model``, and passes them to its decoder."""

    def __init__(self, model: Any, device: Any, spec: MediaSpec) -> None:
        self._model, self._device, self._spec = model, device, spec
        self._taken = inspect.signature(model.forward).parameters
        self._types = self._types_argument(model.config.get_text_config(decoder=True))
        self._index = getattr(model.base_model, "get_rope_index", None)
        self._capturing = False
        self._chunk: tuple[PromptMedia, int, int] | None = None
        #: Features by adapter and digest: an adapter may change the layers that compute them.
        self._kept: OrderedDict[tuple[str, bytes], MediaFeatures] = OrderedDict()
        self._bytes = 0
        self._hook = model.get_decoder().register_forward_pre_hook(self._before_decoder, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook of the decoder."""
        self._hook.remove()

    def open(self, prompt: Sequence[int], items: Sequence[MediaItem]) -> PromptMedia | None:
        """Return the media of a prompt (token ids); None without items."""
        if not items:
            return None
        media = PromptMedia(items, list(prompt))
        keyed = sorted(
            (position, words[number % len(words)])
            for item, positions in self._spec.places(prompt, items)
            for words in [item.words()]
            for number, position in enumerate(positions)
        )
        media.places = [position for position, _ in keyed]
        media.keys = [key for _, key in keyed]
        return media

    def compute(self, media: PromptMedia, adapter: str) -> None:
        """Compute the network's arguments for reading the prompt; ``adapter`` is in use.

        The errors of networks have many types.
        """
        places = self._spec.places(media.prompt, media.items)
        placed = [(positions, self._features(item, adapter)) for item, positions in places]
        order = torch.tensor([position for positions, _ in placed for position in positions]).argsort()
        media.embeddings = torch.cat([features.embeddings for _, features in placed])[order]
        media.deep = [torch.cat(layer)[order] for layer in zip(*(features.deep for _, features in placed), strict=True)]
        if self._index is not None:
            self._place(media)
        for positions, features in placed:
            if features.types is not None:
                if media.types is None:
                    media.types = torch.full((1, len(media.prompt)), features.types[0], device=self._device)
                media.types[0, positions] = features.types[1]
        media.ready = True

    def begin(self, media: PromptMedia, start: int, stop: int) -> dict[str, Any]:
        """Return arguments of the network for a run over tokens ``start`` to ``stop``, which uses their features."""
        self._chunk = media, start, stop
        arguments = {}
        if media.whole and start == 0:
            arguments[self._types] = media.types[:, :stop]
        if media.positions is not None and start < len(media.prompt):
            own, length = media.positions[:, :, start:stop], len(media.prompt)
            later = torch.arange(length, max(stop, length), device=self._device) + media.offset
            arguments["position_ids"] = torch.cat([own, later.expand(3, 1, -1)], dim=-1)
        return arguments

    def _features(self, item: MediaItem, adapter: str) -> MediaFeatures:
        key = adapter, item.digest
        features = self._kept.get(key)
        if features is None:
            features = self._compute(item)
            self._kept[key] = features
            self._bytes += features.size
            while self._bytes > self._spec.cache_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.size
        else:
            self._kept.move_to_end(key)
        return features

    def _compute(self, item: MediaItem) -> MediaFeatures:
        captured = self._captured(item.arrays)
        places = (torch.as_tensor(item.arrays["input_ids"])[0] == self._spec.placeholders[item.kind]).to(self._device)
        types = None
        if self._types in item.arrays:
            own, at = torch.as_tensor(item.arrays[self._types])[0], places.cpu()
            types = int(own[~at][0]) if bool((~at).any()) else 0, int(own[at][0])
        # Only the features are kept, not all that the views are of.
        return MediaFeatures(
            captured["inputs_embeds"][0][places].clone(),
            [layer.clone() for layer in captured.get(_DEEP) or ()],
            types,
        )

    def _types_argument(self, config: Any) -> str:
        """Return the name of the network's argument for the types of tokens; empty if it has none."""
        if getattr(config, "use_bidirectional_attention", None) == "vision":
            return _KINDS
        return _TYPES if _TYPES in self._taken else ""

    def _captured(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the decoder in a run of the network."""
        self._capturing = True
        try:
            self._model(**network_inputs(self._model, arrays), use_cache=False)
        except _Captured as captured:
            return captured.arguments
        finally:
            self._capturing = False
            self._forget_positions()
        raise ValueError("the network does not call its decoder with the features")

    def _forget_positions(self) -> None:
        """Remove the offset of the last prompt, which networks with such positions keep for the next one."""
        if self._index is not None:
            self._model.base_model.rope_deltas = None

    def _place(self, media: PromptMedia) -> None:
        """Compute the positions of a prompt, and the offset of tokens after it."""
        ids = torch.tensor([media.prompt], device=self._device)
        kinds = torch.zeros_like(ids)
        for item, positions in self._spec.places(media.prompt, media.items):
            kinds[0, positions] = _NUMBERS[item.kind]
        taken = inspect.signature(self._index).parameters  # type: ignore[arg-type]
        given = {
            name: torch.cat([torch.as_tensor(item.arrays[name]) for item in media.items]).to(self._device)
            for name in media.items[0].arrays
            if name in taken and name not in ("input_ids", "attention_mask", _KINDS)
        }
        if _KINDS in taken:
            given[_KINDS] = kinds
        media.positions, offset = self._index(ids, **given)  # type: ignore[misc]
        media.offset = int(offset)

    def _before_decoder(self, module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """End the run, or put features into the arguments of the decoder; called before each of its runs."""
        if self._capturing:
            raise _Captured(named)
        if self._chunk is None:
            return None
        media, start, stop = self._chunk
        self._chunk = None
        numbers = [number for number, place in enumerate(media.places) if start <= place < stop]
        if not numbers:
            return None
        places = [media.places[number] - start for number in numbers]
        embeddings = named["inputs_embeds"].clone()
        embeddings[:, places] = media.embeddings[numbers].to(embeddings)
        changed = {**named, "inputs_embeds": embeddings}
        if media.deep:
            rows = embeddings.shape[0]
            mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=self._device)
            mask[:, places] = True
            changed |= {_PLACES: mask, _DEEP: [layer[numbers].repeat(rows, 1) for layer in media.deep]}
        return arguments, changed
