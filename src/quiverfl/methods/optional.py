"""Functions that a method may have and most do not."""

from __future__ import annotations

from dataclasses import replace
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


@runtime_checkable
class NamesPersonalPart(Protocol):
    """A method that says itself which part of a model is personal, whatever the task says."""

    def personal_part(self, task: Task) -> tuple[str, ...]:
        """Prefixes of parameter names, as `Task.personal` has them."""


def split_task(method: Method, task: Task) -> Task:
    """The task with the personal part that the method names; itself where it names none."""
    if not isinstance(method, NamesPersonalPart):
        return task
    part = method.personal_part(task)
    return task if task.personal == part else replace(task, personal=part)


def adaptation_phase(method: Method, task: Task) -> Train | None:
    return method.adapt(task) if isinstance(method, AdaptsModels) else None


def message_bytes(method: Method, message: Message) -> Tensor:
    """Bytes the message of one client takes on the network, as a scalar tensor."""
    return method.payload(message) if isinstance(method, SizesMessages) else dense_bytes(message)


def dense_bytes(message: Message) -> Tensor:
    """Bytes of a message that is sent whole."""
    return torch.tensor(sum(leaf.numel() * leaf.element_size() for leaf in message.values()))
