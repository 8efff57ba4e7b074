"""Loads the checkpoint in this process, without a server; the first time it is downloaded."""

from pathlib import Path

MODEL = Path(__file__).parent


def test_labels_are_best_first(load_model):
    reply = load_model(MODEL)(text_input="The bus is late.")
    scores = reply["score"][0].tolist()
    assert len(reply.texts("label")) == len(scores) > 1
    assert scores == sorted(scores, reverse=True)


def test_the_best_label_alone_can_be_asked_for(load_model):
    model = load_model(MODEL)
    best = model(text_input="The bus is late.", top_k=1)
    assert best.texts("label") == model(text_input="The bus is late.").texts("label")[:1]
