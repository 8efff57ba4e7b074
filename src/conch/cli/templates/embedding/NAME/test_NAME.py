"""Loads the checkpoint in this process, without a server; the first time it is downloaded."""

from pathlib import Path

import numpy as np

MODEL = Path(__file__).parent
TEXTS = ["The bus is late.", "Where is the library?"]


def test_every_text_has_an_embedding(load_model):
    embeddings = load_model(MODEL)(text_input=TEXTS)["embedding"]
    assert embeddings.shape[0] == len(TEXTS) and np.isfinite(embeddings).all()


def test_neighbours_in_a_batch_change_nothing(load_model):
    model = load_model(MODEL)
    together = model(text_input=TEXTS)["embedding"]
    alone = np.concatenate([model(text_input=text)["embedding"] for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-4)
