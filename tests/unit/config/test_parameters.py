"""Names of parameters: known, misspelt, and those that a user keeps for purposes of their own."""

from __future__ import annotations

import pytest

from conch.config.parameters import Parameter, ParameterTable
from conch.core.errors import Code, ConchError
from tests.refusals import refused

DECLARED = (Parameter("max_num_seqs", "sequences", "48", ""), Parameter("threads", "cores", "all", ""))
STRICT = ParameterTable("own", DECLARED, strict=True)
LENIENT = ParameterTable("triton", DECLARED, frozenset({"GPU_IDS"}), prefix="session.")


def refusal(table: ParameterTable, *names: str) -> ConchError:
    return refused(table.check, names)


def test_known_names_pass() -> None:
    assert STRICT.check(["threads", "max_num_seqs"]) == []
    assert LENIENT.check(["threads", "GPU_IDS", "session.anything"]) == []


@pytest.mark.parametrize("table", [STRICT, LENIENT])
@pytest.mark.parametrize("name", ["max_num_seq", "max_nums_seqs", "MAX_NUM_SEQS"])
def test_misspelt_name_is_refused_with_the_right_one(table: ParameterTable, name: str) -> None:
    error = refusal(table, "threads", name)
    assert error.message == f"parameter '{name}' is not known; did you mean 'max_num_seqs'?"
    assert error.code is Code.INVALID_ARG


def test_name_that_resembles_none_is_refused_where_all_are_known() -> None:
    assert refusal(STRICT, "team").message == (
        "parameter 'team' is unknown to backend 'own'; it has max_num_seqs, threads"
    )


def test_name_that_resembles_none_has_no_effect_elsewhere() -> None:
    assert LENIENT.check(["team", "threads", "colour"]) == ["colour", "team"]
