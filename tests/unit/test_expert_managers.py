"""What does not go with expert managers."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megatron_mux.errors import UserError
from megatron_mux.expert_managers import Master
from megatron_mux.expert_ranks import ExpertRanks, Feature

NOTHING: Any = None


@pytest.mark.parametrize("feature", get_args(Feature))
def test_what_does_not_go_with_managers_is_refused_with_them_alone(feature: Feature) -> None:
    ExpertRanks(0, 2, 0, 2, NOTHING, NOTHING, over_data=True).refuse(feature, "NAME", "OTHER")
    connected = dict.fromkeys(("headers", "forth", "back", "outbox"), NOTHING)
    master = Master(0, 3, 0, 1, NOTHING, NOTHING, over_data=True, **connected)
    with pytest.raises(UserError, match=r"(?s)NAME.*: ") as refused:
        master.refuse(feature, "NAME", "OTHER")
    assert "expert-managers" in str(refused.value) or "expert managers" in str(refused.value)
