"""[devices], [network] and [clock] of a configuration, and what they come to: a Timing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from quiverfl.clock.devices import Devices, draw_traces
from quiverfl.clock.formats import read_devices, read_traces
from quiverfl.errors import QuiverError, suggest
from quiverfl.options import NotNegative, Positive, check_options, python_number

Waits = Literal["all", "graph", "pairs", "nobody"]
Away = Literal["wait", "skip"]
ASYNCHRONOUS = ("pairs", "nobody")


@dataclass(frozen=True)
class DeviceSettings:
    """Section [devices]: how fast clients compute, what they draw, and when they are there.

    `step` is the seconds of a local step of the slowest client. The fastest is `spread` times as
    fast, log-uniformly; with `sigma` steps are log-normal with median `step`. `file` gives them
    (clock/formats.py). `away` is the fraction of time that clients are away, `mean_on` how many
    seconds they stay on average; `traces` is a file that says it. `watts` are drawn in training
    and otherwise.
    """

    step: Positive = 0.1
    spread: Positive = 1.0
    sigma: NotNegative | None = None
    file: str | None = None
    away: float = 0.0
    mean_on: Positive = 120.0
    traces: str | None = None
    watts: tuple[float, float] = (5.0, 0.5)

    def __post_init__(self) -> None:
        check_options(self, "devices")
        if self.spread < 1:
            raise QuiverError(f"devices.spread = {self.spread:g}: it must be 1 or more.")
        if self.sigma is not None and self.spread != 1:
            raise QuiverError("devices.sigma and devices.spread: give one of them.")
        watts = tuple(self.watts) if isinstance(self.watts, list | tuple) else (self.watts,)
        if len(watts) != 2 or any(isinstance(w, bool | str) or not w >= 0 for w in watts):
            raise QuiverError(
                f"devices.watts = {self.watts!r}: give two numbers, 0 or more: in training and "
                "otherwise, such as [5.0, 0.5]."
            )
        object.__setattr__(self, "watts", watts)
        if not 0 <= self.away < 1:
            raise QuiverError(
                f"devices.away = {self.away:g}: it must be in [0, 1); who is always away is no "
                "client."
            )
        if self.away and self.traces is not None:
            raise QuiverError("devices.away and devices.traces: give one of them.")
        if self.mean_on != DeviceSettings.mean_on and not self.away:
            raise QuiverError(
                f"devices.mean_on = {self.mean_on:g} without devices.away: nobody is ever away; "
                "say which share of the time clients are."
            )
        self._check_file()

    def _check_file(self) -> None:
        """Refuse what a file of devices says itself."""
        if self.file is None:
            return
        own = ("spread", "sigma", *(["step"] if self.file.endswith(".csv") else []))
        for name in own:
            if getattr(self, name) != getattr(DeviceSettings, name):
                raise QuiverError(
                    f"devices.{name} and devices.file: {self.file} says how fast every client is; "
                    "give one of them."
                )


@dataclass(frozen=True)
class NetworkSettings:
    """Section [network]: bytes a second of the fastest uplink and downlink, and what they cost.

    The slowest link is `spread` times as slow, log-uniformly. `server` is the bandwidth of a
    server in each direction, `latency` the seconds that every message takes beside its bytes.
    """

    up: Positive = 1.25e6
    down: Positive | None = None
    spread: Positive = 1.0
    latency: NotNegative = 0.0
    server: Positive = 12.5e6
    joules_per_mb: NotNegative = 1.0

    def __post_init__(self) -> None:
        check_options(self, "network")
        if self.spread < 1:
            raise QuiverError(f"network.spread = {self.spread:g}: it must be 1 or more.")


MOST_EVALUATIONS = 100_000


@dataclass(frozen=True)
class ClockSettings:
    """Section [clock]: which clients wait for each other, and how long the run is.

    `waits`: a client's next round begins when all clients are done ("all"), when what its graph
    promises is here ("graph"), when the next client that is ready has exchanged with it ("pairs"),
    or at once ("nobody"). "pairs" and "nobody" run `until` so many seconds and evaluate every
    `evaluate_every` seconds, by default ten times. In all other runs `away = "skip"` leaves
    out of a round each client that is away when it begins, and `deadline` each message that has not
    arrived so many seconds after its receiver was done.
    """

    waits: Waits | None = None
    until: Positive | None = None
    evaluate_every: Positive | None = None
    away: Away = "wait"
    deadline: Positive | None = None

    def __post_init__(self) -> None:
        check_options(self, "clock")
        if self.waits is not None and self.waits not in get_args(Waits):
            raise QuiverError(
                f"clock.waits = {self.waits!r}: {suggest(str(self.waits), get_args(Waits))}"
            )
        if self.waits is None:
            given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            if given:
                raise QuiverError(
                    f'clock.{given[0]} without clock.waits: say who waits: "all", "graph", "pairs" '
                    'or "nobody".'
                )
        elif self.waits in ASYNCHRONOUS:
            self._check_asynchronous()
        else:
            for name in ("until", "evaluate_every"):
                if getattr(self, name) is not None:
                    raise QuiverError(
                        f'clock.{name} with clock.waits = "{self.waits}": rounds end it, so give '
                        f'run.{"rounds" if name == "until" else name}, or waits = "nobody".'
                    )

    def _check_asynchronous(self) -> None:
        if self.until is None:
            raise QuiverError(
                f'clock.waits = "{self.waits}" without clock.until: nobody counts rounds, so such '
                "a run would never end; give seconds, such as until = 3600."
            )
        if math.isinf(self.until):
            raise QuiverError(
                "clock.until = inf: such a run would never end; give seconds, such as until = 3600."
            )
        if self.evaluate_every is not None and self.evaluate_every > self.until:
            raise QuiverError(
                f"clock.evaluate_every = {self.evaluate_every:g} is after clock.until = "
                f"{self.until:g}: give less."
            )
        if self.evaluate_every is not None and self.until / self.evaluate_every > MOST_EVALUATIONS:
            raise QuiverError(
                f"clock.evaluate_every = {self.evaluate_every:g} evaluates clock.until = "
                f"{self.until:g} more than {MOST_EVALUATIONS:,} times: give more seconds."
            )
        if self.deadline is not None or self.away != "wait":
            name = "away" if self.deadline is None else "deadline"
            raise QuiverError(
                f'clock.{name} with clock.waits = "{self.waits}": nobody waits for those away; '
                "leave it out."
            )

    @property
    def asynchronous(self) -> bool:
        return self.waits in ASYNCHRONOUS

    @property
    def times(self) -> list[float]:
        """When an asynchronous run is evaluated, in seconds; the last time is its end."""
        assert self.until is not None
        every = self.until / 10 if self.evaluate_every is None else self.evaluate_every
        count = math.ceil(self.until / every - 1e-9)
        return [*(every * (k + 1) for k in range(count - 1)), self.until]


def choose_rounds(clock: ClockSettings, given: Mapping[str, Any]) -> dict[str, int]:
    """`rounds` and `evaluate_every` of a run that counts none: one for each evaluation."""
    chosen = {"rounds": len(clock.times), "evaluate_every": 1}
    for name, value in chosen.items():
        if given.get(name, value) != value:
            other = "clock.until" if name == "rounds" else "clock.evaluate_every"
            raise QuiverError(
                f'run.{name} = {given[name]} with clock.waits = "{clock.waits}": nobody counts '
                f"rounds there, and {other} says it in seconds; leave run.{name} out."
            )
    return chosen


@dataclass(frozen=True, eq=False)
class Timing:
    """The clock of a run: its devices, and the fields of ClockSettings."""

    devices: Devices
    clock: ClockSettings

    def __init__(self, devices: Devices, **options: Any) -> None:
        known = [field.name for field in fields(ClockSettings)]
        for name in options:
            if name not in known:
                raise QuiverError(f"Timing has no option {name!r}; {suggest(name, known)}")
        if not isinstance(devices, Devices):
            raise QuiverError(f"devices is a {type(devices).__name__}: give qv.Devices(…).")
        object.__setattr__(self, "devices", devices)
        clock = ClockSettings(**python_number({"waits": "graph", **options}))
        object.__setattr__(self, "clock", clock)

    def record(self) -> dict[str, dict[str, Any]]:
        """Entries of a run folder: the clock, and a digest of the devices."""
        values = {f.name: getattr(self.devices, f.name) for f in fields(Devices)}
        text = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
        digest = hashlib.sha256(repr(text).encode()).hexdigest()[:16]
        return {"clock": asdict(self.clock), "devices": {"digest": digest}}


def make_devices(
    devices: DeviceSettings,
    network: NetworkSettings,
    clients: int,
    seed: int,
    batch_size: int | None = None,
) -> Devices:
    """The devices that two sections describe."""
    for name in ("up", "down", "spread"):
        if devices.file is not None and getattr(network, name) != getattr(NetworkSettings, name):
            raise QuiverError(
                f"network.{name} and devices.file: {devices.file} says how fast every link is; "
                "give one of them."
            )
    if devices.traces is None:
        traces = draw_traces(clients, devices.away, devices.mean_on, seed)
    else:
        traces = read_traces(Path(devices.traces), clients, seed)
    drawn = Devices.draw(
        clients,
        step=devices.step,
        spread=devices.spread,
        sigma=devices.sigma,
        up=network.up,
        down=network.down,
        link_spread=network.spread,
        seed=seed,
        latency=network.latency,
        server=network.server,
        watts=devices.watts[0],
        idle_watts=devices.watts[1],
        joules_per_mb=network.joules_per_mb,
    )
    values: dict[str, Any] = {f.name: getattr(drawn, f.name) for f in fields(Devices)}
    if devices.file is not None:
        read = read_devices(Path(devices.file), clients, seed, batch_size, devices.step)
        values.update(read)
    return Devices(**{**values, "traces": traces})


def read_sections(tree: Mapping[str, Any], source: str) -> tuple[DeviceSettings, NetworkSettings]:
    """The two sections of a file that describes devices and nothing else needs."""
    for section in tree:
        if section not in ("devices", "network"):
            raise QuiverError(
                f"{source}: unknown section {section}; a file of devices has [devices] and "
                "[network] alone."
            )
    made: list[Any] = []
    for section, kind in (("devices", DeviceSettings), ("network", NetworkSettings)):
        values = tree.get(section, {})
        if not isinstance(values, Mapping):
            raise QuiverError(f"{source}: {section} must be a section: write [{section}].")
        known = [field.name for field in fields(kind)]
        for name in values:
            if name not in known:
                raise QuiverError(f"{source}: unknown key {section}.{name}; {suggest(name, known)}")
        make: Any = kind
        made.append(make(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))
    return made[0], made[1]
