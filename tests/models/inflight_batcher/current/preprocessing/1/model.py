"""Texts and words to token ids."""

import json
from itertools import chain

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


def parameter(config, name, default):
    value = config["parameters"].get(name, {}).get("string_value", "")
    return default if not value or value.startswith("${") else value


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = parameter(config, "tokenizer_dir", "")
        # The library alone: transformers takes seconds to import.
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        with open(f"{folder}/tokenizer_config.json") as file:
            settings = json.load(file)
        self.end = self.tokenizer.token_to_id(settings["eos_token"])
        self.pad = self.tokenizer.token_to_id(settings.get("pad_token") or settings["eos_token"])
        self.special = parameter(config, "add_special_tokens", "true").lower() in ("true", "1", "t", "y", "yes")
        self.types = {
            output["name"]: pb_utils.triton_string_to_numpy(output["data_type"]) for output in config["output"]
        }

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        rows = len(given["QUERY"])
        end = given.get("END_ID", np.full((rows, 1), self.end))
        pad = given.get("PAD_ID", np.full((rows, 1), self.pad))
        prompts = [self.encode(row[0], self.special) for row in given["QUERY"]]
        made = {
            "INPUT_ID": self.filled(prompts, pad),
            "REQUEST_INPUT_LEN": [[len(ids)] for ids in prompts],
            "DECODER_INPUT_ID": pad,
            "REQUEST_DECODER_INPUT_LEN": np.ones((rows, 1)),
            "BAD_WORDS_IDS": self.words(given.get("BAD_WORDS_DICT"), rows),
            "STOP_WORDS_IDS": self.words(given.get("STOP_WORDS_DICT"), rows),
            "REQUEST_OUTPUT_LEN": given["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": end,
            "OUT_PAD_ID": pad,
        }
        if "EMBEDDING_BIAS_WORDS" in given:
            made["EMBEDDING_BIAS"] = self.bias(given["EMBEDDING_BIAS_WORDS"], given["EMBEDDING_BIAS_WEIGHTS"])
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, np.array(value, self.types[name]))
                for name, value in made.items()
                if name in self.types
            ]
        )

    def encode(self, text, special=False):
        return self.tokenizer.encode(text.decode(), add_special_tokens=special).ids

    @staticmethod
    def filled(lists, pads):
        width = max(map(len, lists))
        return [ids + [int(pad[0])] * (width - len(ids)) for ids, pad in zip(lists, pads, strict=True)]

    def words(self, given, rows):
        """For each row: the ids of all words, and below them where each word ends."""
        if given is None:
            return np.zeros((rows, 2, 0))
        lists = []
        for row in given:
            words = [ids for ids in map(self.encode, row) if ids]
            lists.append((list(chain(*words)), np.cumsum([len(ids) for ids in words], dtype=int).tolist()))
        width = max(1, *(len(ids) for ids, _ in lists))
        return [[ids + [0] * (width - len(ids)), ends + [-1] * (width - len(ends))] for ids, ends in lists]

    def bias(self, words, weights):
        bias = np.zeros((len(words), self.tokenizer.get_vocab_size()))
        for line, row, values in zip(bias, words, weights, strict=True):
            for word, weight in zip(row, values, strict=True):
                line[self.encode(word)] += weight
        return bias
