"""Rows of stacked states: taken, written, sent as messages and merged with what arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.engine.local.step import Buffers
from quiverfl.engine.local.vmap import select_rows, vmap_clients
from quiverfl.errors import Diverged, QuiverError
from quiverfl.methods.contract import Message, Method
from quiverfl.methods.optional import SizesMessages
from quiverfl.methods.state import field_roles, replicated_fields
from quiverfl.support.environment import NO_FLOAT64
from quiverfl.types import Flags, Integers

if TYPE_CHECKING:
    from quiverfl.engine.shard import Shard

STATISTICS = "running_statistics"
"""The leaf of a message that holds running statistics, where they are averaged."""


def take_rows(state: Any, rows: Integers) -> Any:
    """The states of some rows; a view where they lie together."""
    index = _index(rows)
    return type(state)(*(leaf[index] for leaf in state))


def write_rows(state: Any, rows: Integers, new: Any) -> None:
    """Put new states in place of some rows."""
    index = _index(rows)
    for leaf, value in zip(state, new, strict=True):
        value = value.to(leaf.device)
        if leaf.dtype == torch.float64 and value.dtype == torch.float32:
            # It was on a device without float64: what did not change there stays exact.
            value = torch.where(value == leaf[index].float(), leaf[index], value.double())
        if not isinstance(index, slice) or value.data_ptr() != leaf[index].data_ptr():
            leaf[index] = value


def to_device(stacked: Any, device: torch.device) -> Any:
    """States or models on the device that computes; themselves where they are there already.

    A device without float64 is given float32: the host keeps the exact numbers, such as μ.
    """
    if device.type not in NO_FLOAT64:
        return type(stacked)(*(leaf.to(device, non_blocking=True) for leaf in stacked))
    narrow = (leaf.float() if leaf.dtype == torch.float64 else leaf for leaf in stacked)
    return type(stacked)(*(leaf.to(device) for leaf in narrow))


def open_client(shard: Shard, rows: Integers, stage: str = "mixed") -> Tensor | None:
    """Compute the model of this one client; on a copy of its statistics, if it has any."""
    row, copy, task = int(rows[0]), None, shard.context.task
    if shard.statistics is not None:
        statistics = shard.statistics[row]
        if stage == "local":
            statistics = shard.local.statistics.get(row, statistics)
        copy = statistics.to(shard.context.device, copy=True)
    own = task.of_client(int(shard.ids[row])) if task.own_models else None
    shard.context.programs.open_client(own, copy)
    return copy


def merge_states(
    state: Any, mixed: Message, merge: Callable[..., Any], away: Flags | None, width: int
) -> None:
    """Merge in place what arrived, `width` rows at a time: no second copy of all states is made.

    Server state of clients that are away stays as it is.
    """
    clients = len(next(iter(state)))
    for begin in range(0, clients, width):
        rows = np.arange(begin, min(begin + width, clients))
        arrived = {name: leaf[_index(rows)] for name, leaf in mixed.items()}
        old = take_rows(state, rows)
        merged = vmap_clients(merge)(old, arrived)
        if away is not None and away[rows].any():
            fields = replicated_fields(type(old))
            pairs = {name: (getattr(old, name), getattr(merged, name)) for name in fields}
            stays = {name: select_rows(away[rows], *pair) for name, pair in pairs.items()}
            merged = merged._replace(**stays)
        write_rows(state, rows, merged)


def check_finite(
    state: Any, clients: Integers, round: int | Integers, what: str = "the trained state"
) -> None:
    """End a run in which a trained state is not finite."""
    for leaf in state:
        sums = leaf.reshape(len(clients), -1).sum(dim=1)
        bad = torch.nonzero(~torch.isfinite(sums))
        if len(bad):
            client = int(clients[int(bad[0])])
            when = round if isinstance(round, int) else int(round[client])
            raise Diverged(when, client, what)


def emit_messages(
    method: Method, state: Any, rows: Integers | None, statistics: Tensor | None
) -> Message:
    """The messages of all clients or of some rows. A leaf sent as it stands is the state's own.

    `statistics` are given where running statistics are sent and averaged.
    """
    emit = vmap_clients(method.message)
    if rows is None:
        return _add_statistics(dict(emit(state)), statistics, method, state, slice(None))
    # vmap takes no empty stack: one client gives the shapes of a message without any.
    messages = emit(take_rows(state, rows if len(rows) else np.array([0])))
    messages = _add_statistics(messages, statistics, method, state, torch.from_numpy(rows))
    return {name: leaf[: len(rows)] for name, leaf in messages.items()}


def message_bytes(method: Method, messages: Message) -> Any:
    """Bytes of each message: one number for all, or one per client if the method sizes them."""
    if not isinstance(method, SizesMessages):
        return sum(leaf[0].nbytes for leaf in messages.values())
    sent = {name: leaf for name, leaf in messages.items() if name != STATISTICS}
    beside = messages[STATISTICS][0].nbytes if STATISTICS in messages else 0
    return vmap_clients(method.payload)(sent).cpu().numpy() + beside


def _add_statistics(
    message: Message, statistics: Tensor | None, method: Method, state: Any, rows: slice | Tensor
) -> Message:
    """The message with the running statistics, weighed as its shared part is.

    Of several models it is the last one's: the one that is sent.
    """
    if statistics is None:
        return message
    weight, own = statistics_weight(method, state, message), statistics[rows, -1]
    if weight is not None:
        return {**message, STATISTICS: own * message[weight].to(own.dtype).unsqueeze(1)}
    return {**message, STATISTICS: own.clone()}


def merge_statistics(statistics: Tensor, mixed: Message, method: Method, state: Any) -> Message:
    """Keep the average of the statistics that arrived. Returns the rest of the message."""
    rest = {name: leaf for name, leaf in mixed.items() if name != STATISTICS}
    weight = statistics_weight(method, state, rest)
    average = mixed[STATISTICS]
    if weight is not None:
        average = average / rest[weight].to(average.dtype).unsqueeze(1)
    statistics[:, -1] = average.to(statistics.device)
    return rest


def statistics_weight(method: Method, state: Any, message: Message) -> str | None:
    """The leaf of a message by which its shared part is weighed: what is averaged is divided by it.

    None where rows of weights that sum to 1 do it all. Refuses a method that averages no model.
    """
    roles = field_roles(type(state))
    if not any(roles.get(name) == "shared" for name in message):
        raise QuiverError(
            f'task.buffers = "mixed": {method.title} sends no parameters of the model, with which '
            'running statistics could be averaged: leave it out, or set task.buffers = "personal".'
        )
    scalars = [name for name in message if roles.get(name) == "scalar"]
    if method.mass is None and len(scalars) > 1:
        raise QuiverError(
            f'task.buffers = "mixed": {method.title} sends several numbers ({", ".join(scalars)}), '
            'and none is declared as its mass: set task.buffers = "personal".'
        )
    return method.mass or next(iter(scalars), None)


class PhaseBuffers(dict[int, Buffers]):
    """Optimizer buffers kept between rounds, by the number of their phase."""

    def __init__(self, clients: int, device: torch.device, home: torch.device) -> None:
        super().__init__()
        self._clients, self._device, self._home = clients, device, home

    def take(self, number: int, rows: Integers) -> Buffers | None:
        """The buffers of some rows; None if the phase has not begun."""
        if number not in self:
            return None
        index = torch.from_numpy(rows)
        return {name: leaf[index].to(self._device) for name, leaf in self[number].items()}

    def write(self, number: int, rows: Integers, buffers: Buffers) -> None:
        """Keep the buffers of some rows. They are all zero before a client's first step."""
        whole = self.setdefault(number, {})
        for name, leaf in buffers.items():
            if name not in whole:
                shape = (self._clients, *leaf.shape[1:])
                whole[name] = leaf.new_zeros(shape, device=self._home)
            whole[name][torch.from_numpy(rows)] = leaf.to(self._home)


def _index(rows: Integers) -> slice | Tensor:
    """A slice where rows lie together (a view), a tensor of places where not (a copy)."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
