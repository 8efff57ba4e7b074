"""The client of the Gaudi walkthrough: requests a continuation of a text from several models.

python -m tests.walkthroughs.client --model_name qwen2,llama2
"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.http as httpclient

PROMPT = "I am working on a"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", required=True, help="one name or several, separated by commas")
    parser.add_argument("--url", default="localhost:8000")
    arguments = parser.parse_args()
    client = httpclient.InferenceServerClient(url=arguments.url)
    for name in arguments.model_name.split(","):
        print(f"----- Processing: model {name} -----")
        prompts = np.array([PROMPT], dtype=np.object_)
        prompt = httpclient.InferInput("INPUT0", prompts.shape, "BYTES")
        prompt.set_data_from_numpy(prompts)
        output = httpclient.InferRequestedOutput("OUTPUT0")
        result = client.infer(name, inputs=[prompt], outputs=[output])
        print(f"-----Stats: model {name} -----")
        statistics = client.get_inference_statistics(name)["model_stats"][0]
        print(f"inferences: {statistics['inference_count']}")
        print(f"Output: {result.as_numpy('OUTPUT0').tolist()}")


if __name__ == "__main__":
    main()
