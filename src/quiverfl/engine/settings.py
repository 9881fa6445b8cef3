"""[run] of a configuration: how long a run is, what it records, and how it is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import PlainSerializer, PlainValidator

from quiverfl.errors import QuiverError, suggest
from quiverfl.options import Count, Number, check_options, python_number
from quiverfl.support.environment import NO_FLOAT64

ExecutorName = Literal["auto", "vectorized", "sequential", "measure"]
HistoryName = Literal["auto", "clients", "hundredths"]
Precision = Literal["float32", "tf32", "bf16", "auto"]
Layout = Literal["auto", "contiguous", "channels_last", "measure"]


def _parse_dtype(value: object) -> object:
    """Return the type that a configuration names."""
    if value in ("float32", "float64"):
        return getattr(torch, str(value))
    if isinstance(value, torch.dtype):
        return value
    raise ValueError("input should be 'float32' or 'float64'")


def _parse_device(value: object) -> object:
    if isinstance(value, str | torch.device):
        return value
    raise ValueError("input should be a valid string")


DType = Annotated[
    torch.dtype,
    PlainValidator(_parse_dtype),
    PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."), return_type=str),
]
Device = Annotated[
    torch.device | str, PlainValidator(_parse_device), PlainSerializer(str, return_type=str)
]


@dataclass(frozen=True)
class RunSettings:
    """Section [run], from a configuration or from Python.

    `rounds=0` leaves the initial states. `threads=None` chooses by the size of the model.

    `epochs_per_client` replaces the epochs of the phase that trains what is sent; `epoch_groups`
    gives equal groups of clients their own number of epochs each. `keep_local` keeps, at the end,
    every client's model from before the last communication: one more copy of all models.
    `gradients` measures, in every evaluated round, the gradients that DFedPGP's theorem bounds
    (engine/gradient_norms.py). `arithmetic="peers"` rounds as real peers do, one client at a time:
    a share before it is sent, sums in client order, mass in whole units. Sync peers equal such a
    run bit for bit.

    `precision` says how exactly products are computed (engine/execution.py); `"auto"` is bfloat16
    where the processor has it and a trial before the run is faster. `layout` says how images lie in
    memory where clients are computed one by one: `"auto"` goes by the model's layers, `"measure"`
    by a trial. What a trial chose is recorded; last bits depend on it. `compile` compiles the
    vectorized step first. `patience` ends the run after so many evaluations in a row in which the
    mean over clients after communication was no better: what it picks is no longer measured by
    their test data. `states` says whether the clients' states lie on the device, or in
    the host's memory and visit the device for training. `history` says what is recorded of every
    evaluation: each client's numbers, or means over hundredths of all clients, from the lowest to
    the highest ("auto": with more than 50,000 clients). `chunk` clients are computed together at
    most; None: as many as there is room for.
    """

    rounds: Count = 20
    seed: Count = 0
    common_init: bool = True
    epochs_per_client: tuple[int, ...] | None = None
    epoch_groups: tuple[int, ...] | None = None
    evaluate_every: Number = 1
    patience: Number | None = None
    keep_local: bool = True
    gradients: bool = False
    dtype: DType = torch.float32
    device: Device = "cpu"
    threads: Number | None = None
    executor: ExecutorName = "auto"
    precision: Precision = "float32"
    layout: Layout = "auto"
    compile: bool = False
    states: Literal["device", "host"] = "device"
    arithmetic: Literal["matrix", "peers"] = "matrix"
    checkpoint_every: Number = 10
    history: HistoryName = "auto"
    chunk: Number | None = None

    def __post_init__(self) -> None:
        check_options(self, "run")
        for name in ("epochs_per_client", "epoch_groups"):
            epochs = getattr(self, name)
            if epochs is not None:
                object.__setattr__(self, name, _whole_epochs(name, epochs))
        if self.epochs_per_client is not None and self.epoch_groups is not None:
            raise QuiverError("run.epochs_per_client and run.epoch_groups: give one of them.")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise QuiverError(
                f"dtype = {self.dtype!r}: give a floating-point type, such as torch.float32."
            )
        self._check_float64()
        self._check_executor()
        self._check_precision()

    def _check_float64(self) -> None:
        """If the device has no float64, the states stay on the host, and with them μ."""
        kind = str(self.device).split(":")[0]
        if kind not in NO_FLOAT64:
            return
        if self.dtype == torch.float64:
            raise QuiverError(
                f'dtype = "float64" on device {str(self.device)!r}, which has no float64: leave '
                'dtype out, or compute on "cpu".'
            )
        object.__setattr__(self, "states", "host")

    def _check_executor(self) -> None:
        if self.arithmetic == "peers" and self.executor == "vectorized":
            raise QuiverError(
                'executor = "vectorized" computes several clients in one product, which rounds '
                'otherwise than a peer does: with arithmetic = "peers" use "sequential" or "auto".'
            )
        if self.compile and (self.executor in ("sequential", "measure") or self._bf16):
            raise QuiverError(
                "compile = true compiles what is computed for many clients together: with "
                f'executor = "vectorized" or "auto" and without precision = "{self._rough}". '
                "Leave one out."
            )
        if self.layout != "auto" and self.executor == "vectorized":
            raise QuiverError(
                f'layout = "{self.layout}" with executor = "vectorized": images lie as vmap has '
                'them there; set executor = "sequential", or leave layout out.'
            )

    @property
    def has_trial(self) -> bool:
        """Whether a trial before the run chooses how models are computed."""
        return "measure" in (self.executor, self.layout) or self.precision == "auto"

    @property
    def _bf16(self) -> bool:
        return self.precision in ("bf16", "auto")

    @property
    def _rough(self) -> str:
        return self.precision if self._bf16 else "bf16"

    def _check_precision(self) -> None:
        """Refuse what would be ignored without a word."""
        if self.precision == "tf32" and torch.device(self.device).type != "cuda":
            raise QuiverError(
                f'precision = "tf32" on device {str(self.device)!r}: it is a format of NVIDIA '
                "GPUs; leave precision out, or compute on cuda."
            )
        if self.precision != "float32" and self.dtype != torch.float32:
            raise QuiverError(
                f'precision = "{self.precision}" with dtype = {self.dtype}: it makes float32 '
                "faster and nothing else; leave one of them out."
            )
        if self._bf16 and self.executor == "vectorized":
            raise QuiverError(
                f'precision = "{self.precision}" with executor = "vectorized": torch.vmap ignores '
                'autocast, so everything would stay float32; set executor = "sequential", or leave '
                "it out."
            )

    def for_clients(self, clients: int) -> RunSettings:
        """Return the settings of a run with so many clients, on a device that is there.

        Epochs are then per client, and the executor is the one that computes as peers do.
        """
        self.check_device()
        epochs, groups = self.epochs_per_client, self.epoch_groups
        if groups is not None:
            epochs = tuple(groups[client * len(groups) // clients] for client in range(clients))
        # A peer computes one client; several in one product would round otherwise.
        executor = "sequential" if self.arithmetic == "peers" else self.executor
        return replace(self, executor=executor, epochs_per_client=epochs, epoch_groups=None)

    def check_device(self) -> None:
        """Refuse a device that this machine or this build of torch does not have."""
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError, TypeError) as error:
            first = str(error).splitlines()[0].split(". ")[0].rstrip(".")
            if str(self.device).startswith("mps"):
                first = "torch finds no GPU of Apple's here"
            raise QuiverError(
                f"device {str(self.device)!r} cannot be used: {first}. Use 'cpu', or install a "
                "torch build for your GPU (README)."
            ) from error

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RunSettings:
        """Make settings from keyword arguments; refuse an unknown one with the nearest name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise QuiverError(f"simulate has no option {name!r}; {suggest(name, known)}")
        return cls(**options)


def is_evaluated(round: int, every: int, rounds: int) -> bool:
    """Whether a round is evaluated: every `every` rounds, and the last."""
    return (round + 1) % every == 0 or round == rounds - 1


def _whole_epochs(name: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise QuiverError(
            f"{name} = {given!r}: give one whole number for each client, such as [1, 1, 5]."
        )
    epochs = tuple(python_number(number) for number in given)
    for place, number in enumerate(epochs):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise QuiverError(
                f"{name}[{place}] = {number!r}: it must be a whole number, 0 or more."
            )
    return epochs
