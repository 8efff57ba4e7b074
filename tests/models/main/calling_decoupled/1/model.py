"""Passes the responses of ``repeat`` on, one by one, from a thread."""

import threading

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.threads = set()

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(target=self.pass_on, args=(request.inputs(), request.get_response_sender()))
            self.threads.add(thread)
            thread.start()

    def pass_on(self, inputs, sender):
        inner = pb_utils.InferenceRequest(model_name="repeat", requested_output_names=["OUT"], inputs=inputs)
        for response in inner.exec(decoupled=True):
            if response.output_tensors() or response.has_error():
                sender.send(response)
        sender.send(flags=FINAL)
        self.threads.discard(threading.current_thread())

    def finalize(self):
        for thread in list(self.threads):
            thread.join()
