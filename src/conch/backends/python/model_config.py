"""``pb_utils.ModelConfig``: the configuration that ``auto_complete_config`` receives, completes and returns.

Runs in the worker of a Python model. The error messages are Triton's.
"""

from __future__ import annotations

import json
from typing import Any

_HELPER = "auto-complete-config function for model"


class ModelConfig:
    """A model's configuration; changes may fill in missing fields but must not contradict existing ones."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary, in the format of ``GET /config``."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        present = self._model_config["max_batch_size"]
        if present > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {present}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching. Raises ValueError if the configuration has another scheduler."""
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or complete the existing one: ``name``, ``data_type``, ``dims``, ``optional``."""
        self._check("input", input, ("name", "data_type", "dims", "optional"))
        self._merge("input", input)

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete the existing one: ``name``, ``data_type``, ``dims``."""
        self._check("output", output, ("name", "data_type", "dims"))
        self._merge("output", output)

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set whether the model is decoupled: ``{"decoupled": bool}``."""
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in {_HELPER} '{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', "
                f"which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = wanted

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def _check(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        if any(key not in allowed for key in tensor):
            *first, last = (f"'{key}'" for key in allowed)
            raise ValueError(
                f"{kind} '{tensor.get('name', '')}' in {_HELPER} '{self._name}' contains property other than "
                f"{', '.join(first)} and {last}."
            )
        if "name" not in tensor:
            raise ValueError(f"{kind} in {_HELPER} '{self._name}' is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{tensor['name']}' in {_HELPER} '{self._name}' is missing '{key}' property.")

    def _merge(self, kind: str, tensor: dict[str, Any]) -> None:
        tensors: list[dict[str, Any]] = self._model_config[kind]
        name = tensor["name"]
        present: dict[str, Any] | None = next((known for known in tensors if known["name"] == name), None)
        if present is None:
            tensors.append(tensor)
            return
        datatype = present.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {datatype} for {kind} '{name}', "
                f"model provides {tensor['data_type']}"
            )
        about = f"model '{self._name}', tensor '{name}': the model expects"
        dims = present.get("dims")
        if dims and dims != tensor["dims"]:
            raise ValueError(f"{about} dims {tensor['dims']} but the model configuration specifies dims {dims}")
        if "optional" in tensor and present.get("optional", tensor["optional"]) != tensor["optional"]:
            raise ValueError(
                f"{about} optional {tensor['optional']} but the model configuration specifies optional "
                f"{present['optional']}"
            )
        present.update(tensor)
