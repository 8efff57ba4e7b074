"""Code that runs in worker processes, under the model's interpreter (Python 3.9 or newer); needs only numpy."""
