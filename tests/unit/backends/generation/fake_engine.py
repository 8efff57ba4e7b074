"""An engine without a network, and a tokenizer without a vocabulary: bytes are tokens.

A sequence continues with the alphabet after the last letter of its prompt.
"""

from __future__ import annotations

import threading

from conch.backends.generation.engine import EngineRequest, EngineUsage, GenerationEngine, Progress, TokenLogprobs
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens
from conch.core.errors import invalid
from conch.core.sampling.parameters import Feature
from conch.core.sampling.structures import Structure

EOS = 0


class FakeEngine(GenerationEngine):
    """Counts what it is asked; a step has ``step_tokens`` letters; ``broken`` makes the next one raise."""

    name = "fake"
    features = frozenset(Feature) - {Feature.GRAMMAR}

    def __init__(self, *, context: int = 64, max_sequences: int = 4, cache_tokens: int = 0) -> None:
        self.context, self.max_sequences, self.vocabulary = context, max_sequences, 256
        self.cache_tokens = cache_tokens
        self.adapters = ("red",)
        self.running: dict[int, tuple[EngineRequest, list[int]]] = {}
        self.most = 0
        self.step_tokens = 1
        self.broken = False
        self.closed = False
        #: What ``compile`` was given, what ``add`` got from it, and what lets a text that begins with ``slow`` go on.
        self.compiling: list[str] = []
        self.compiled: list[str | None] = []
        self.go_on = threading.Event()

    def compile(self, structure: Structure) -> str:
        self.compiling.append(structure.text)
        if structure.text == "bad":
            raise invalid("the structure does not compile")
        if structure.text == "raises":
            raise TypeError("incompatible arguments")
        if structure.text.startswith("slow"):
            assert self.go_on.wait(60)
        return structure.text.upper()

    def add(self, request: EngineRequest) -> None:
        self.compiled.append(request.compiled)
        self.running[request.id] = request, []

    def step(self) -> list[Progress]:
        steps: dict[tuple[int, int], Progress] = {}
        for _ in range(self.step_tokens):
            for progress in self._decode():
                step = steps.setdefault((progress.id, progress.beam), progress)
                if step is not progress:
                    step.tokens, step.finish = [*step.tokens, *progress.tokens], progress.finish
                    step.logprobs = step.logprobs and [*step.logprobs, *(progress.logprobs or [])]
        return list(steps.values())

    def _decode(self) -> list[Progress]:
        if self.broken:
            raise RuntimeError("no memory left")
        self.most = max(self.most, len(self.running))
        made = []
        for id, (request, tokens) in list(self.running.items()):
            sampling = request.sampling
            following = (tokens or request.prompt)[-1] + 1
            token = EOS if following > ord("z") else following
            tokens.append(token)
            ended = "stop" if token == EOS else "length" if len(tokens) >= sampling.max_tokens else ""
            if ended:
                del self.running[id]
            if sampling.beam_width > 1:
                made += [
                    Progress(id, tokens, ended, beam=beam, cumulative_logprob=-1.0 - beam)
                    for beam in range(sampling.n if ended else 0)
                ]
                continue
            logprobs = None if sampling.logprobs is None else [TokenLogprobs(-0.5, 1, [(token, -0.5), (65, -2.0)])]
            first = sampling.prompt_logprobs is not None and len(tokens) == 1
            prompt = [TokenLogprobs(-1.5, 2, [(65, -0.5)]) for _ in request.prompt[1:]] if first else None
            made.append(Progress(id, [token], ended, logprobs=logprobs, prompt_logprobs=prompt))
        return made

    def cancel(self, id: int) -> None:
        self.running.pop(id, None)

    def usage(self) -> EngineUsage:
        used = sum(len(request.prompt) + len(tokens) for request, tokens in self.running.values())
        return EngineUsage(running=len(self.running), used_tokens=used)

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def close(self) -> None:
        self.closed = True


class ByteTokenizer(FastTokenizer):
    """Each byte is the token of its number; 0 is special and ends a text."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = iter(sorted(set(range(256)) - set(map(ord, letters))))
        vocabulary = {letter: ord(letter) if ord(letter) < 256 else next(others) for letter in letters}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        end = made.id_to_token(EOS)
        made.add_special_tokens([end])
        template = ChatTemplate(
            {"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}, {}, "a test"
        )
        super().__init__(made, SpecialTokens.of({"eos_token": end}, made.token_to_id, {EOS}), template)
