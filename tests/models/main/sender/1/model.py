"""A non-decoupled model that answers through response senders; OUTPUT says what the sender's checks raised."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([text], np.object_))])


def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return str(error)
    return "nothing raised"


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            mode = pb_utils.get_input_tensor_by_name(request, "MODE").as_numpy()[0].decode()
            if mode == "returned":
                answers.append(response(mode))
                continue
            answers.append(None)
            sender = request.get_response_sender()
            if mode == "direct":
                sender.send(response(mode), flags=FINAL)
            elif mode == "thread":
                threading.Thread(target=sender.send, args=(response(mode), FINAL)).start()
            elif mode == "late_final":
                sender.send(response(mode))
                sender.send(flags=FINAL)
            elif mode == "bad_flag":
                sender.send(response(refused(sender.send, response(mode), flags=7)), flags=FINAL)
            elif mode == "no_response":
                sender.send(response(refused(sender.send)), flags=FINAL)
            elif mode == "final_first":
                sender.send(response(refused(sender.send, flags=FINAL)), flags=FINAL)
            elif mode == "error":
                error = pb_utils.TritonError("sent an error", pb_utils.TritonError.UNSUPPORTED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            elif mode == "twice":
                sender.send(response(mode))
                text = refused(sender.send, response(mode))
                sender.send(flags=FINAL)
                print("sender twice:", text, flush=True)
            elif mode == "closed":
                sender.send(response(mode), flags=FINAL)
                print("sender closed:", refused(sender.send, response(mode)), flush=True)
        return answers
