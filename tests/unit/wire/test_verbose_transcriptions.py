from __future__ import annotations

import orjson
import pytest
from openai.types.audio import TranscriptionVerbose

from conch.core.tensors import WireTensor, pack_bytes
from conch.wire.transcriptions import TranscriptionPlan


@pytest.mark.parametrize(("chunks", "duration"), [([{"text": "a", "start": 0.5, "end": 2.0}], 2.0), ([], 0.0)])
def test_model_that_reports_no_duration_gives_the_end_of_the_text(
    chunks: list[dict[str, object]], duration: float
) -> None:
    plan = TranscriptionPlan(
        task="transcribe", format="verbose_json", stream=False, temperature=0, timestamps=["segment"]
    )
    texts = {"text_output": b"a", "chunks": orjson.dumps(chunks)}
    outputs = [WireTensor(name, "BYTES", (1,), pack_bytes([text])) for name, text in texts.items()]
    answer = TranscriptionVerbose.model_validate_json(plan.body([outputs]))
    assert (answer.duration, answer.language, answer.usage) == (duration, "", None)
    assert [segment.seek for segment in answer.segments or ()] == [50] * len(chunks)
