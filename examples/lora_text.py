"""Fine-tune a small transformer with adapters, on text that has owners.

The text is Python's own standard library, which is wherever Python is. A language model of
characters is first trained on the modules that are single files. The clients are the packages
(asyncio, email, json, …), each with its own words and habits; each adapts the model to itself.

    python examples/lora_text.py               # about a minute and a half on one free core
    python examples/lora_text.py --quick       # seconds: to see that it runs
    python examples/lora_text.py --freeze-a    # A as drawn, only B is trained (FFA-LoRA)
    python examples/lora_text.py --alternate   # B in one round, A in the next (RoLoRA)

Three ways, the same data and rounds: adapters alone at every client (Local), adapters shared and
heads personal (DFedPGP), and everything fine-tuned (DFedPGP). Beside the perplexity: what a client
keeps and sends. The last two options exist because an average of products B A is not the product of
the averages; if one factor is the same for all, it is.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quiverfl as qv

LETTERS = "\n" + "".join(chr(code) for code in range(32, 127))
PLACES = 64
PACKAGES = ("asyncio", "ctypes", "curses", "dbm", "email", "encodings", "html", "http", "importlib")
PACKAGES += ("json", "logging", "multiprocessing", "sqlite3", "unittest", "wsgiref", "xml")


class Text(nn.Module):
    """A transformer that says what the next character is at every place."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Parameter(torch.zeros(PLACES, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))
        self.register_buffer("ahead", torch.ones(PLACES, PLACES, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.letters(ids) + self.places
        logits: Tensor = self.head(self.body(hidden, mask=self.ahead))
        return logits


def windows(text: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Some pieces of a text, and the same one character further on."""
    known = {letter: number for number, letter in enumerate(LETTERS)}
    ids = np.array([known[letter] for letter in text if letter in known])
    starts = np.arange(0, len(ids) - PLACES - 1, PLACES)
    chosen = np.random.default_rng(seed).permutation(starts)[:count]
    pieces = np.stack([ids[start : start + PLACES + 1] for start in chosen])
    return pieces[:, :-1], pieces[:, 1:]


def source(files: Iterable[Path], most: int | None) -> str:
    """What is written in some files, or in as many of them as a quick look needs."""
    chosen = sorted(files)[:most]
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in chosen)


def trained_before(steps: int, files: int | None, seed: int = 0) -> dict[str, Tensor]:
    """The model that everybody starts from, made here."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = source(library.glob("*.py"), files)
    x, y = (torch.from_numpy(part) for part in windows(text, 8000, 1))
    torch.manual_seed(seed)
    model = Text().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        rows = torch.arange(32 * step, 32 * (step + 1)) % len(x)
        loss = F.cross_entropy(model(x[rows]).transpose(1, 2), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained on single files: {steps} steps, perplexity {loss.exp().item():.2f} there")
    return model.state_dict()


def owned_text(
    packages: tuple[str, ...], train: int, test: int, files: int | None
) -> qv.FederatedData:
    library = Path(sysconfig.get_paths()["stdlib"])
    parts = []
    for place, package in enumerate(packages):
        text = source((library / package).rglob("*.py"), files)
        x, y = windows(text, train + test, place)
        cut = len(x) * train // (train + test)
        parts.append(((x[:cut], y[:cut]), (x[cut:], y[cut:])))
    return qv.FederatedData.from_arrays(
        [part[0] for part in parts], [part[1] for part in parts], names=packages
    )


class AlternatingState(NamedTuple):
    u: qv.Shared
    v: qv.Personal
    mu: qv.Scalar
    round: qv.Scalar


@dataclass(frozen=True)
class AlternatingLoRA(qv.DFedPGP):
    """DFedPGP whose clients train the Bs in even rounds and the As in odd ones.

    Both are sent, so that the factor that rests comes ever closer to being the same for all. Weight
    decay would move it, too: leave it at 0.
    """

    name = "alternating_lora"
    title = "Alternating LoRA"

    def init(self, task: qv.Task, start: qv.Start) -> AlternatingState:
        state = super().init(task, start)
        return AlternatingState(state.u, state.v, state.mu, torch.zeros_like(state.mu))

    def phases(self, task: qv.Task) -> tuple[qv.Train, ...]:
        """Those of DFedPGP, but the gradient of the factor that rests is 0."""
        layout = task.shared_layout
        of_a = layout.join(
            {
                name: torch.full(shape, float(name.endswith("lora_A")))
                for name, shape in zip(layout.names, layout.shapes, strict=True)
            }
        )

        def rest(gradient: qv.Params, params: qv.Params, state: AlternatingState) -> qv.Params:
            trains_a = torch.remainder(state.round, 2).to(gradient.shared)
            mask = of_a.to(gradient.shared)
            chosen = mask * trains_a + (1 - mask) * (1 - trains_a)
            return qv.Params(gradient.shared * chosen, gradient.personal)

        personal, shared = super().phases(task)
        return personal, replace(shared, gradient=rest)

    def merge(self, state: AlternatingState, mixed: qv.Message) -> AlternatingState:
        return super().merge(state, mixed)._replace(round=state.round + 1)


def freeze_a(model: nn.Module) -> nn.Module:
    """Leave every A as it was drawn, which is the same for all clients."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_A"):
            parameter.requires_grad_(False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=int, default=4)
    factors = parser.add_mutually_exclusive_group()
    factors.add_argument("--freeze-a", action="store_true")
    factors.add_argument("--alternate", action="store_true")
    wanted = parser.parse_args()
    steps, rounds, train, files = (3, 1, 3, 6) if wanted.quick else (300, 4, 24, None)
    packages = PACKAGES[:5] if wanted.quick else PACKAGES
    start = trained_before(steps, files)
    data = owned_text(packages, train, train // 3, files)

    def whole() -> nn.Module:
        model = Text()
        model.load_state_dict(start)
        return model

    def adapted() -> nn.Module:
        model = qv.lora(whole(), rank=wanted.rank)
        return freeze_a(model) if wanted.freeze_a else model

    clients = data.clients
    isolated = qv.isolated(clients=clients)
    push = qv.random_push(clients=clients, neighbors=3, seed=0)
    local, dfedpgp = qv.Local(epochs=3), qv.DFedPGP(personal_epochs=1, shared_epochs=2)
    alternating = AlternatingLoRA(personal_epochs=1, shared_epochs=2)
    adapters = alternating if wanted.alternate else dfedpgp
    ways = (
        ("adapters, alone", adapted, local, isolated),
        ("adapters shared, heads personal", adapted, adapters, push),
        ("everything shared, heads personal", whole, dfedpgp, push),
    )
    body = sum(parameter.numel() for parameter in Text().parameters())
    print(f"{clients} clients; the model has {body:,} parameters, {4 * body / 1e6:.2f} MB")
    for name, model, method, topology in ways:
        task = qv.Task(model, loss="next_token")
        begin = time.perf_counter()
        run = qv.simulate(
            task,
            data,
            method=method,
            topology=topology,
            training=qv.Training(lr=2e-3, optimizer="adamw", batch_size=8, clip_norm=1.0),
            rounds=rounds,
            evaluate_every=rounds,
        )
        kept = 4 * (task.shared_layout.size + task.personal_layout.size)
        sent = run.rounds["network_bytes"].iloc[-1] / clients
        found = run.summary["stages"]["mixed"]["last"]
        print(
            f"{name}: perplexity {found['mean']:.3f}, worst tenth {found['worst10']:.3f}; a client "
            f"keeps {kept / 1e3:.0f} kB and sends {sent / 1e3:.0f} kB a round; "
            f"{time.perf_counter() - begin:.0f} s"
        )
    zero = qv.simulate(
        qv.Task(whole, loss="next_token"),
        data,
        method=local,
        topology=isolated,
        training=qv.Training(lr=1e-9),
        rounds=1,
    )
    print(f"not adapted: perplexity {zero.summary['stages']['mixed']['last']['mean']:.3f}")


if __name__ == "__main__":
    main()
