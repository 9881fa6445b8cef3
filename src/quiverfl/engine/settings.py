"""How long a run is, what it records, and how it is carried out: [run] as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from quiverfl.engine.history import evaluates
from quiverfl.errors import QuiverError, nearest

ExecutorName = Literal["auto", "vectorized", "sequential", "measure"]
Precision = Literal["float32", "tf32", "bf16"]
Where = Literal["device", "host"]
Arithmetic = Literal["matrix", "peers"]


@dataclass(frozen=True)
class RunSettings:
    """`rounds=0` leaves the initial states. `threads=None` chooses by the size of the model.

    `epochs_per_client` replaces the epochs of the phase that trains what is sent. `keep_local`
    keeps, at the end, every client's model from before the last communication: one more copy of
    all models. `gradients` measures, in every evaluated round, the gradients that DFedPGP's
    theorem bounds (engine/gradients.py). `arithmetic="peers"` rounds as real peers do, one client
    at a time: a share before it is sent, sums in client order, mass in whole units.

    `precision` says how exactly products are computed (engine/precision.py), `compile` that the
    vectorized step is compiled first, `states` whether the clients' states lie on the device or in
    the host's memory, from where those in training visit it. `chunk` clients are computed together
    at most; None: as many as there is room for.
    """

    rounds: int
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    threads: int | None = None
    executor: ExecutorName = "auto"
    arithmetic: Arithmetic = "matrix"
    common_init: bool = True
    epochs_per_client: tuple[int, ...] | None = None
    evaluate_every: int = 1
    keep_local: bool = True
    gradients: bool = False
    checkpoint_every: int = 10
    precision: Precision = "float32"
    compile: bool = False
    states: Where = "device"
    chunk: int | None = None

    def __post_init__(self) -> None:
        _whole("rounds", self.rounds, 0)
        _whole("seed", self.seed, 0)
        _whole("evaluate_every", self.evaluate_every, 1)
        _whole("checkpoint_every", self.checkpoint_every, 1)
        if self.threads is not None:
            _whole("threads", self.threads, 1)
        if self.chunk is not None:
            _whole("chunk", self.chunk, 1)
        for name, known in (
            ("executor", get_args(ExecutorName)),
            ("arithmetic", get_args(Arithmetic)),
            ("precision", get_args(Precision)),
            ("states", get_args(Where)),
        ):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise QuiverError(f"{name} = {value!r}: {nearest(str(value), known)}")
        if self.arithmetic == "peers":
            self._one_by_one()
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise QuiverError(
                f"dtype = {self.dtype!r}: give a floating-point type, such as torch.float32."
            )
        if self.epochs_per_client is not None:
            object.__setattr__(self, "epochs_per_client", _epochs(self.epochs_per_client))
        _check_device(self.device)
        self._check_precision()
        if self.compile and (self.executor in ("sequential", "measure") or self._bf16):
            raise QuiverError(
                "compile = true compiles what is computed for many clients together: with "
                'executor = "vectorized" or "auto" and without precision = "bf16". Leave one out.'
            )

    @property
    def _bf16(self) -> bool:
        return self.precision == "bf16"

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
                'precision = "bf16" with executor = "vectorized": torch.vmap ignores autocast, so '
                'everything would stay float32; set executor = "sequential", or leave it out.'
            )

    def _one_by_one(self) -> None:
        """A peer computes one client; several in one product would round otherwise."""
        if self.executor == "vectorized":
            raise QuiverError(
                'executor = "vectorized" computes several clients in one product, which rounds '
                'otherwise than a peer does: with arithmetic = "peers" use "sequential" or "auto".'
            )
        object.__setattr__(self, "executor", "sequential")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RunSettings:
        """From keyword arguments; one that is unknown is refused with the nearest known name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise QuiverError(f"simulate has no option {name!r}; {nearest(name, known)}")
        if "rounds" not in options:
            raise QuiverError("simulate needs rounds, such as rounds=50.")
        return cls(**options)

    def evaluates(self, round: int) -> bool:
        return evaluates(round, self.evaluate_every, self.rounds)

    def checkpoints(self, round: int) -> bool:
        """Whether a checkpoint is due after this round."""
        return (round + 1) % self.checkpoint_every == 0 or round + 1 == self.rounds


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        words = "0 or more" if least == 0 else f"at least {least}"
        raise QuiverError(f"{name} = {value!r}: it must be a whole number, {words}.")


def _epochs(given: Sequence[int]) -> tuple[int, ...]:
    epochs = tuple(int(number) for number in given)
    if epochs and min(epochs) < 0:
        raise QuiverError("epochs_per_client: the numbers of epochs must be 0 or more.")
    return epochs


def _check_device(device: torch.device | str) -> None:
    if str(device).split(":")[0] == "mps":
        raise QuiverError(
            f"device {str(device)!r}: Apple's GPUs have no float64, which push-sum's weights μ are "
            "kept in; use 'cpu'."
        )
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise QuiverError(
            f"device {str(device)!r} cannot be used: {first}. Use 'cpu', or install a torch "
            "build for your GPU (README)."
        ) from error
