"""The ensemble as a program: calls preprocessing, the language model, and postprocessing for each of its answers."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

BEFORE = {
    "QUERY": "text_input", "DECODER_QUERY": "decoder_text_input", "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words", "STOP_WORDS_DICT": "stop_words", "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights", "END_ID": "end_id", "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}  # fmt: skip
PREPARED = {
    "input_ids": "INPUT_ID", "input_lengths": "REQUEST_INPUT_LEN", "request_output_len": "REQUEST_OUTPUT_LEN",
    "decoder_input_ids": "DECODER_INPUT_ID", "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "stop_words_list": "STOP_WORDS_IDS", "bad_words_list": "BAD_WORDS_IDS", "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID", "pad_id": "OUT_PAD_ID",
}  # fmt: skip
ASKED = {
    "runtime_top_k": "top_k", "runtime_top_p": "top_p", "len_penalty": "length_penalty", "streaming": "stream",
    **{
        name: name
        for name in (
            "temperature", "repetition_penalty", "min_length", "presence_penalty", "frequency_penalty", "random_seed",
            "return_log_probs", "return_context_logits", "return_generation_logits", "num_return_sequences",
            "beam_width", "exclude_input_in_output", "prompt_embedding_table", "prompt_vocab_size",
        )
    },
}  # fmt: skip
PASSED_ON = ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index",
             "sequence_index")  # fmt: skip


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.accumulate = self.parameter(config, "accumulate_tokens", "false").lower() == "true"
        self.llm = self.parameter(config, "tensorrt_llm_model_name", "tensorrt_llm")
        self.outputs = {output["name"] for output in config["output"]}

    @staticmethod
    def parameter(config, name, default):
        value = config["parameters"].get(name, {}).get("string_value", "")
        return default if not value or value.startswith("${") else value

    def execute(self, requests):
        if not self.decoupled:
            return [next(self.answers(request)) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            try:
                for answer in self.answers(request):
                    if request.is_cancelled():
                        break
                    sender.send(answer)
            except pb_utils.TritonModelException as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            sender.send(flags=FINAL)
        return None

    def answers(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if "text_input" not in given:
            raise pb_utils.TritonModelException("text_input is required")
        if given["max_tokens"].size != 1 or given["max_tokens"].item() <= 0:
            raise pb_utils.TritonModelException("max_tokens must be a single value > 0")
        streams = bool(given.get("stream", np.array([False])).flat[0])
        if streams and not self.decoupled:
            raise pb_utils.TritonModelException("Streaming is only supported in decoupled mode.")
        prepared = self.call("preprocessing", renamed(given, BEFORE), list({*PREPARED.values()}))
        inputs = {**renamed(prepared, PREPARED), **renamed(given, ASKED)}
        so_far = np.zeros((1, 1, 0), np.int32)
        for answer in self.generate(inputs):
            tokens, lengths = answer["output_ids"], answer["sequence_length"]
            if self.accumulate and streams and tokens.shape[:2] == (1, 1):
                tokens = so_far = np.concatenate([so_far, tokens[:, :, : lengths.item()]], axis=2)
                lengths = np.array([[tokens.shape[2]]], np.int32)
            decoded = self.call("postprocessing", {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}, ["OUTPUT"])
            outputs = {"text_output": decoded["OUTPUT"]}
            outputs.update({name: answer[name] for name in PASSED_ON if name in answer and name in self.outputs})
            yield pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def generate(self, inputs):
        """The outputs of each response of the language model."""
        request = self.request(self.llm, inputs, ["output_ids", "sequence_length", *PASSED_ON])
        for response in request.exec(decoupled=True) if self.decoupled else [request.exec()]:
            arrays = checked(response)
            if arrays:
                yield arrays

    def call(self, model, inputs, outputs):
        return checked(self.request(model, inputs, outputs).exec())

    @staticmethod
    def request(model, inputs, outputs):
        tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
        return pb_utils.InferenceRequest(model_name=model, inputs=tensors, requested_output_names=outputs)


def renamed(arrays, names):
    return {name: arrays[source] for name, source in names.items() if source in arrays}


def checked(response):
    """The outputs by name. Raises the error of a response that has one."""
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
