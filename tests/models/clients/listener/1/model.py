"""The length of a WAV file in words."""

import io
import json
import wave

import numpy as np
import triton_python_backend_utils as pb_utils


def text_tensor(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        audio = pb_utils.get_input_tensor_by_name(request, "audio").as_numpy()[0]
        try:
            with wave.open(io.BytesIO(audio)) as recording:
                seconds = recording.getnframes() / recording.getframerate()
        except (wave.Error, EOFError) as error:
            refused = pb_utils.TritonError(f"input 'audio' is no WAV file: {error}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=refused)
        text = f"{seconds} seconds"
        chunks = [{"text": text, "start": 0.0, "end": seconds}]
        return pb_utils.InferenceResponse([text_tensor("text_output", text), text_tensor("chunks", json.dumps(chunks))])
