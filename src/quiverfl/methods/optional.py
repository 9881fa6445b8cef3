"""Functions that a method may have and most do not."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quiverfl.methods.contract import Message, Method, Train
from quiverfl.task import Params, Task


@runtime_checkable
class AdaptsModels(Protocol):
    """A method whose models are fine-tuned, on a copy, before they are evaluated."""

    def adapt(self, task: Task) -> Train[Params]: ...


@runtime_checkable
class SizesMessages(Protocol):
    """A method whose messages take fewer bytes than their tensors, such as sparse ones."""

    def payload(self, message: Message) -> Tensor: ...


def adaptation_phase(method: Method, task: Task) -> Train | None:
    return method.adapt(task) if isinstance(method, AdaptsModels) else None


def message_bytes(method: Method, message: Message) -> Tensor:
    """Bytes the message of one client takes on the network, as a scalar tensor."""
    return method.payload(message) if isinstance(method, SizesMessages) else dense_bytes(message)


def dense_bytes(message: Message) -> Tensor:
    """Bytes of a message that is sent whole."""
    return torch.tensor(sum(leaf.numel() * leaf.element_size() for leaf in message.values()))
