"""The boundary under load balance: the module runs twice, for a head and for a mirror's tail.

The rows of the second call travel to this rank before the first, and its output back behind it::

    rank r        q = [head | tail]      call 1: head          call 2: tail of the mirror rank
                        tail <-> mirror rank                          out <-> mirror rank

In Hybrid this happens behind the exchange of heads: rows are those of the Ulysses group, whose
ranks hold different heads of them, and the mirror is the rank with the same heads in the mirror
group. The halves of the output are put together before heads are traded back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_comm import merge_head_tail, split_head_tail
from hp_cp.call import Call, refuse_inner_hooks
from hp_cp.core_boundary import CPBoundary
from hp_cp.hand_over import describe_view, hand_over, wrap
from hp_cp.inputs import Inputs
from hp_cp.output import OutputDims
from hp_mesh.arguments import read_slots, replace_slots
from hp_mesh.checks import require

__all__ = ["BalancedBoundary"]


def _version(x: Tensor) -> int:
    """Return how often ``x`` was written in place; tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version


@dataclass
class _BalancedCall(Call):
    """A call whose rows are computed in two halves.

    Attributes:
        tail: q of the second half: the mirror rank's tail.
        versions: How often k and v had been written before the first half.
    """

    tail: Tensor | None = None
    versions: list[int] = field(default_factory=list)


class BalancedBoundary(CPBoundary):
    """The boundary of a style with ``load_balance=True`` or ``balance_hybrid=True``."""

    @property
    def _mirrors(self) -> ProcessGroup:
        """The ranks among which tails are traded: those that gather K and V."""
        return self.group if self.colossal_group is None else self.colossal_group

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _BalancedCall:
        """Do as without balance, and trade the tail of q for the mirror rank's."""
        refuse_inner_hooks(module, self._option, self.where)
        inputs = self._agree(args, kwargs)
        q, k, v = self._send(inputs)
        head, tail = split_head_tail(q, self._mirrors, seq_dim=inputs.dims[0])
        view = describe_view(self, inputs)
        args, kwargs = hand_over(self, args, kwargs, inputs, view, (head, k, v))
        call = _BalancedCall(args, kwargs, view, inputs, tail=wrap(self, tail, 0, inputs, view))
        call.versions = [_version(x) for x in read_slots(args, kwargs, inputs.slots)[1:]]
        self._forget(call, inputs, (k, v), args, kwargs)
        return call

    @property
    def _option(self) -> str:
        return self.plan.balance_option.removesuffix("=True")

    def _view_length(self, inputs: Inputs) -> int:
        return self.length(inputs) // 2

    def _leave(self, module: nn.Module, entry: Call, output: Any) -> Any:
        """Run the second half, trade its output back, and join the halves."""
        assert isinstance(entry, _BalancedCall), "made by enter"
        heads: list[tuple[Tensor, OutputDims]] = []
        with entry.view.paused():
            self._map(entry, output, lambda x: heads.append(self._take(entry, x)))
        self._refuse_writes(entry)
        _, entry.view.window = self.plan.rows(self.rank, self.length(entry.inputs))
        args, kwargs = replace_slots(entry.args, entry.kwargs, entry.inputs.slots[:1], [entry.tail])
        second = module.forward(*args, **kwargs)
        queue = iter(heads)

        def join(x: Tensor) -> Tensor:
            head, dims = next(queue)
            tail, _ = self._take(entry, x)
            whole = merge_head_tail(head, tail, self._mirrors, seq_dim=dims.seq_dim)
            return self._restore(entry, self._trade_back(whole, dims), dims)

        with entry.view.paused():
            return self._map(entry, second, join, several=self._option)

    def _refuse_writes(self, entry: _BalancedCall) -> None:
        """Refuse a module that writes to k or v: the second call would see what the first wrote."""
        now = read_slots(entry.args, entry.kwargs, entry.inputs.slots)[1:]
        require(
            [_version(x) for x in now] == entry.versions,
            self.where,
            f"with {self._option} the module is called twice with the same k and v, which it must "
            "not write to in place",
            f"write to a copy (k = k * 2 and not k *= 2), or set {self._option}=False",
        )
