"""The configuration of a text model, completed.  Runs in workers, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.backends.contracts.text.interface import INPUTS, OUTPUTS
from conch.backends.tasks.base import TaskDescription
from conch.backends.tasks.signature import complete_config
from conch.errors import invalid
from conch.sampling import TEXT_GENERATION


def complete_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration (as JSON) with tensors, ``decoupled`` and the task, where it leaves them open.

    Requests have no batch dimension, since each joins the running batch.  Raises INVALID_ARG for
    tensors that such a model does not have, and for a ``max_batch_size``.
    """
    if int(config.get("max_batch_size") or 0) > 0:
        raise invalid(
            f"model '{config.get('name', '')}' has max_batch_size {config['max_batch_size']}, but a text model takes "
            "requests one by one into a running batch: set max_batch_size to 0 and, to bound that batch, "
            "parameter 'max_num_seqs'"
        )
    completed = complete_config(config, TaskDescription(INPUTS, OUTPUTS, max_batch_size=0))
    policy = dict(config.get("model_transaction_policy") or {})
    if "model_transaction_policy" not in config:
        policy["decoupled"] = True
    completed["model_transaction_policy"] = policy
    parameters = dict(config.get("parameters") or {})
    parameters.setdefault("task", {"string_value": TEXT_GENERATION})
    completed["parameters"] = parameters
    return completed
