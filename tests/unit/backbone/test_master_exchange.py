"""A manager that is not in step with its master notices, with rows and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_mux.backbone.experts.master_exchange import ManagerExchange


@pytest.mark.parametrize("rows", [0, 3])
def test_a_header_of_another_layer_is_refused(rows: int) -> None:
    exchange = ManagerExchange(cast(Any, SimpleNamespace(rank=2, size=3)), layer=4)
    nothing = (torch.empty(0), torch.empty(0))
    choice = cast(Any, SimpleNamespace(taken=lambda total: nothing, returning=lambda total: nothing))
    sent = exchange.agreed(choice, torch.tensor([rows, 2 * rows, 4]))
    assert (sent.incoming, sent.pairs) == ((rows, 0, 0), 2 * rows)
    with pytest.raises(RuntimeError, match="expert manager 2 is at layer 4, the master at 5"):
        exchange.agreed(choice, torch.tensor([rows, 2 * rows, 5]))
